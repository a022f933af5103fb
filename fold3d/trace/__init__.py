"""Recording: what a model is made of and where it may be cut; no process group and no device needed."""

from __future__ import annotations

from fold3d.trace.blocks import find_blocks
from fold3d.trace.capture import tied_groups, trace
from fold3d.trace.coat import copy_without_coat
from fold3d.trace.model_trace import BlockCost, Trace
from fold3d.trace.module_results import TreeStructure

__all__ = [
    "BlockCost",
    "Trace",
    "TreeStructure",
    "copy_without_coat",
    "find_blocks",
    "tied_groups",
    "trace",
]
