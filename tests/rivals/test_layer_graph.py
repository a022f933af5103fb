"""Profiles in PipeDream's text form."""

from __future__ import annotations

import pytest

from fold3d.errors import ConfigError
from fold3d.rivals import LayerGraph, Stage

TEXT = (
    "node3 -- ReLU(inplace) -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size=40.000, "
    "parameter_size=0.000\n"
    "node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=9.000, "
    "parameter_size=0.000\n"
    "node2 -- Conv2d(3, 8, kernel_size=(1, 1)) -- forward_compute_time=3.500, backward_compute_time=4.500, "
    "activation_size=[100.0; 20.0], parameter_size=800.000\n"
    "node4 -- Add(2) -- forward_compute_time=0.500, backward_compute_time=0.500, activation_size=7.000, "
    "parameter_size=0.000\n"
    "node5 -- __getitem__(1) -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=20.000, "
    "parameter_size=0.000\n"
    "\tnode1 -- node2\n"
    "\tnode2 -- node3\n"
    "\tnode3 -- node4\n"
    "\tnode2 -- node4\n"
    "\tnode2 -- node5\n"
)


def test_text_is_read_and_written() -> None:
    graph = LayerGraph.parse(TEXT)
    assert str(graph) == TEXT
    assert graph.nodes[2].activation_bytes == (100.0, 20.0) and graph.nodes[2].parameter_bytes == 800.0
    assert ("node2", "node4") in graph.edges


def test_a_row_has_what_works_and_all_that_crosses_a_cut() -> None:
    row = LayerGraph.parse(TEXT).row()
    assert row.names == ("Conv2d(3, 8, kernel_size=(1, 1))", "ReLU(inplace)", "Add(2)")  # no input, no idle sink
    assert row.seconds == (0.008, 0.003, 0.001)
    assert row.sent_bytes == (120.0, 160.0, 0.0)  # the convolution's output goes past the ReLU as well
    assert row.parameter_bytes == (800.0, 0.0, 0.0)


def test_a_cut_graph_says_the_stages() -> None:
    cut = LayerGraph.parse(TEXT).cut([Stage(0, 1, 3), Stage(1, 3, 1)])
    assert [node.stage for node in cut.nodes] == [1, 0, 0, 1, 0]
    assert str(cut).splitlines()[0].endswith(" -- stage_id=1")
    assert LayerGraph.parse(str(cut)) == cut


@pytest.mark.parametrize(
    "text, message",
    [
        ("node1 -- ReLU\n", "line 1 of a graph, 'node1 -- ReLU', is no layer and no edge"),
        (TEXT.replace("parameter_size=800.000", "weight=3"), "line 3 of a graph.*'parameter_size'"),
        (TEXT + "\tnode4 -- node9\n", "an edge of 'node9'"),
        (TEXT + TEXT.splitlines()[0], "two layers alike"),
    ],
)
def test_what_is_no_graph(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerGraph.parse(text)


def test_a_circle_is_no_row() -> None:
    with pytest.raises(ConfigError, match="in a circle"):
        LayerGraph.parse(TEXT + "\tnode4 -- node3\n").row()
