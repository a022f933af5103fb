"""Which stage holds, counts and saves which parameter."""

from __future__ import annotations

from fold3d.placement.parameter_placement import ParameterPlacement

TIED = [("embed.weight", "head.weight")]


def test_each_parameter_has_one_home() -> None:
    placement = ParameterPlacement.from_chunks(2, [["embed.weight", "a"], ["b"], ["c"], ["head.weight", "d"]], TIED)
    assert {name: placement.home(name) for name in placement.owners} == {
        "embed.weight": 0,
        "a": 0,
        "b": 1,
        "c": 0,
        "d": 1,
    }


def test_tied_parameters_are_shared_by_their_stages() -> None:
    placement = ParameterPlacement.from_chunks(2, [["embed.weight"], ["b"], ["c"], ["head.weight"]], TIED)
    assert placement.shared_stages() == {"embed.weight": (0, 1)}


def test_a_tie_inside_one_stage_is_not_shared() -> None:
    placement = ParameterPlacement.from_chunks(1, [["embed.weight"], ["head.weight"]], TIED)
    assert placement.shared_stages() == {}


def test_a_parameter_every_chunk_needs() -> None:
    placement = ParameterPlacement.from_chunks(2, [["p", "a"], ["p"], ["p"], ["p"]], ())
    assert placement.shared_stages() == {"p": (0, 1)}
