"""What the planners of PipeDream, PipeDream-2BW and PTD-P would choose, beside fold3d's own; pure arithmetic."""

import torch  # noqa: F401  loads the libraries that _C is linked with

from fold3d.rivals.layer_graph import GraphNode, LayerGraph
from fold3d.rivals.pipedream import COSTS, LayerRow, Level, PipedreamPlan, Stage, pipedream
from fold3d.rivals.ptd_p import PtdPlan, Transformer, ptd_p
from fold3d.rivals.two_bw import EqualBlocks, TwoBwPlan, two_bw

__all__ = [
    "COSTS",
    "EqualBlocks",
    "GraphNode",
    "LayerGraph",
    "LayerRow",
    "Level",
    "PipedreamPlan",
    "PtdPlan",
    "Stage",
    "Transformer",
    "TwoBwPlan",
    "pipedream",
    "ptd_p",
    "two_bw",
]
