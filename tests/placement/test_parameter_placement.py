"""Which stage holds, counts and saves which parameter."""

from __future__ import annotations

from fold3d.placement.parameter_placement import Cells

TIED = [("embed.weight", "head.weight")]


def test_each_parameter_has_one_home() -> None:
    cells = Cells.from_chunks(2, [["embed.weight", "a"], ["b"], ["c"], ["head.weight", "d"]], TIED)
    assert {name: cells.home(name) for name in cells.owners} == {"embed.weight": 0, "a": 0, "b": 1, "c": 0, "d": 1}


def test_tied_parameters_are_shared_by_their_stages() -> None:
    cells = Cells.from_chunks(2, [["embed.weight"], ["b"], ["c"], ["head.weight"]], TIED)
    assert cells.shared_stages() == {"embed.weight": (0, 1)}


def test_a_tie_inside_one_stage_is_not_shared() -> None:
    cells = Cells.from_chunks(1, [["embed.weight"], ["head.weight"]], TIED)
    assert cells.shared_stages() == {}


def test_a_parameter_every_chunk_needs() -> None:
    cells = Cells.from_chunks(2, [["p", "a"], ["p"], ["p"], ["p"]], ())
    assert cells.shared_stages() == {"p": (0, 1)}
