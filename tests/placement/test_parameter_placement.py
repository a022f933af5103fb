"""Which chunk and stage needs, holds, counts and saves which parameter."""

from __future__ import annotations

import pytest

from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.topology import Submesh
from tests.trace.chains import needed_parameters, record
from tests.trace.zoo import FAMILIES, build, plain, tokens

TIED_IN_GPT2 = [("transformer.wte.weight", "lm_head.weight")]
TIED = [("embed.weight", "head.weight")]


def placed(needed: list[list[str]], pp: int) -> ParameterPlacement:
    return ParameterPlacement.from_needed(needed, TIED, pp)


def test_each_parameter_has_one_home() -> None:
    placement = placed([["embed.weight", "a"], ["b"], ["c"], ["head.weight", "d"]], 2)
    homes = {name: placement.home(name) for name in placement.readers}
    assert homes == {"embed.weight": 0, "a": 0, "b": 1, "c": 0, "d": 1}


def test_tied_parameters_are_summed_over_their_stages() -> None:
    placement = placed([["embed.weight"], ["b"], ["c"], ["head.weight"]], 2)
    assert placement.shared() == {"embed.weight": Submesh(pp=(0, 1))}
    assert placement.summed_over("b") == Submesh(pp=(1,))


def test_a_tie_inside_one_stage_is_not_shared() -> None:
    placement = placed([["embed.weight"], ["head.weight"]], 1)
    assert placement.shared() == {}
    assert placement.readers_on("embed.weight", 0) == (0, 1)


def test_a_parameter_every_chunk_needs() -> None:
    placement = placed([["p", "a"], ["p"], ["p"], ["p"]], 2)
    assert placement.shared() == {"p": Submesh(pp=(0, 1))}
    assert [placement.readers_on("p", stage) for stage in (0, 1)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_of_a_recorded_model(pp: int) -> None:
    """The blocks' modules, the parameters in them and what is tied are where the chunks are."""
    model = build("gpt2")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    placement = ParameterPlacement.of(names, record(model), [(0, 1), (1, 2), (2, 3), (3, 4)], pp, TIED_IN_GPT2)
    for block in range(4):
        assert placement.stage_of_module(f"transformer.h.{block}.attn.bias") == block % pp
        assert f"transformer.h.{block}.ln_1.weight" in placement.held_by(block % pp)
    assert placement.stage_of_module("transformer.ln_f.weight") == pp - 1
    assert placement.stage_of_module("a.buffer.of.nobody") == 0
    assert set().union(*(placement.held_by(stage) for stage in range(pp))) == set(names)
    assert set(placement.shared()) == ({"transformer.wte.weight"} if pp > 1 else set())


def test_of_a_model_in_one_piece() -> None:
    placement = ParameterPlacement.of(["a", "embed.weight", "head.weight"], None, [(0, 0)], 1, TIED)
    assert placement.held_by(0) == {"a", "embed.weight", "head.weight"}
    assert placement.readers == {"a": (0,), "embed.weight": (0,)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_an_owner_and_only_tied_ones_have_two(family: str) -> None:
    model = build(family)
    recorded = record(model)
    ranges = [(0, 1), (1, 2), (2, 4)]
    owners: dict[str, list[int]] = {name: [] for name, _ in model.named_parameters(remove_duplicate=False)}
    for chunk in range(3):
        for name in needed_parameters(model, recorded, ranges, chunk):
            owners[name].append(chunk)
    tied = recorded.canonical()
    assert all(chunks for chunks in owners.values())
    for name, chunks in owners.items():
        assert len(chunks) == 1 or (name in tied and chunks == [0, 2]), name


def test_plain_module() -> None:
    model = plain()
    recorded = record(model, tokens())
    first = set(needed_parameters(model, recorded, [(0, 2), (2, 4)], 0))
    last = set(needed_parameters(model, recorded, [(0, 2), (2, 4)], 1))
    assert first & last == {"embedding.weight", "head.weight", "position", "scale"}
    assert {name for name in first if name.startswith("layers")} == {
        f"layers.{i}.{p}" for i in (0, 1) for p in
        ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    }  # fmt: skip
