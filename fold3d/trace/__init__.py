"""What a model is made of, where it may be cut, and how one chunk of it runs; no process group and no device
needed."""

from __future__ import annotations

from fold3d.trace.blocks import find_blocks
from fold3d.trace.capture import tied_groups, trace
from fold3d.trace.errors import SplitError
from fold3d.trace.materialize import materialize
from fold3d.trace.model_trace import BlockCost, Trace
from fold3d.trace.ownership import is_released, owned_parameters, release
from fold3d.trace.split_model import SplitModel
from fold3d.trace.structure import TreeStructure
from fold3d.trace.whole_model import WholeModel
from fold3d.trace.wrappers import drop_wrappers

__all__ = [
    "BlockCost",
    "SplitError",
    "SplitModel",
    "Trace",
    "TreeStructure",
    "WholeModel",
    "drop_wrappers",
    "find_blocks",
    "is_released",
    "materialize",
    "owned_parameters",
    "release",
    "tied_groups",
    "trace",
]
