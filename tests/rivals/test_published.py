"""PipeDream's published configurations (SOSP 2019, table 1) from its own profiles: which costs and links give which.

The profiles are not part of this project: FOLD3D_PIPEDREAM_PROFILES names a folder with alexnet.txt, vgg16.txt,
resnet50.txt and gnmt.txt, of `profiler/*/profiles` of github.com/msr-fiddle/pipedream. They are of one GPU that is
older than the paper's.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fold3d.rivals import LayerGraph, Level, pipedream

FOLDER = os.environ.get("FOLD3D_PIPEDREAM_PROFILES")
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="FOLD3D_PIPEDREAM_PROFILES names no folder with PipeDream's profiles"
)

GBIT = 1e9 / 8
A = [Level(4, 5e9), Level(4, 10 * GBIT)]  # 4 servers with 4 GPUs on shared PCIe, 10 Gbit/s between them
A_FLAT = [Level(16, 10 * GBIT)]  # the same with all links of 10 Gbit/s
A_ONE = [Level(4, 5e9)]
B = [Level(8, 30e9), Level(2, 25 * GBIT)]  # 2 servers with 8 GPUs on NVLink, 25 Gbit/s between them
B_FLAT = [Level(16, 25 * GBIT)]

CASES = [
    # profile, machines, costs, what comes out, whether that is the published configuration
    ("vgg16", A_FLAT, "ring", "15-1", True),
    ("vgg16", A_FLAT, "text", "15-1", True),
    ("vgg16", B_FLAT, "text", "15-1", True),
    ("vgg16", B_FLAT, "ring", "16", False),
    ("vgg16", A, "ring", "12-2-1-1", False),
    ("vgg16", A, "text", "12-2-1-1", False),
    ("resnet50", A, "ring", "16", True),
    ("resnet50", A_FLAT, "ring", "16", True),
    ("resnet50", B, "ring", "16", True),
    ("resnet50", B, "text", "16", True),
    ("resnet50", A_FLAT, "text", "8-8", False),
    ("alexnet", A_FLAT, "text", "15-1", True),
    ("alexnet", B_FLAT, "text", "15-1", True),
    ("alexnet", A_FLAT, "ring", "16", False),
    ("gnmt", A_ONE, "ring", "straight", True),
    ("gnmt", A_ONE, "text", "straight", True),
    ("gnmt", B, "ring", "8-8", False),
]


@pytest.mark.parametrize("name, levels, cost, expected, published", CASES)
def test_configurations(name: str, levels: list[Level], cost: str, expected: str, published: bool) -> None:
    graph = LayerGraph.parse((Path(str(FOLDER)) / f"{name}.txt").read_text())
    assert LayerGraph.parse(str(graph)) == graph
    plan = pipedream(graph.row(), levels, cost)
    assert plan.name == expected
    table = {
        "vgg16": {16: "15-1"},
        "resnet50": {16: "16"},
        "alexnet": {16: "15-1"},
        "gnmt": {4: "straight", 16: "16"},  # GNMT-8
    }
    assert (plan.name == table[name][plan.workers]) == published
    assert len(graph.cut(plan.stages).nodes) == len(graph.nodes)
