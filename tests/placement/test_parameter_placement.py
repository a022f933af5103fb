"""Which chunk and stage needs, holds, counts and saves which parameter."""

from __future__ import annotations

import pytest

from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Shard
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


@pytest.mark.gate(cases=3)
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


# Weights spread over tensor-parallel groups


def sharded(needed: list[list[str]], pp: int, **shards: Shard) -> ParameterPlacement:
    ranks = next(iter(shards.values())).ranks
    return placed(needed, pp).sharded(ShardingPlan(tp=ranks, shards=shards))


def test_who_is_responsible_for_a_part() -> None:
    """Each index of each parameter has one responsible rank, or where parts overlap all that hold it."""
    pairs = Shard(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)))  # two ranks for each of two key heads
    fused = Shard(0, 6, (((0, 2), (4, 5)), ((2, 4), (4, 5)), ((0, 2), (5, 6)), ((2, 4), (5, 6))))
    shards = {"rows": Shard.even(0, 8, 4), "pairs": pairs, "fused": fused}
    placement = sharded([["rows", "pairs", "fused", "norm"], ["far"]], 2, **shards)

    def responsible(name: str, stage: int) -> list[int]:
        return [tp for tp in range(4) if placement.is_responsible(name, stage, tp)]

    assert responsible("rows", 0) == [0, 1, 2, 3] and responsible("rows", 1) == []
    assert responsible("pairs", 0) == [0, 2]
    assert responsible("fused", 0) == [0, 1, 2, 3]
    assert responsible("norm", 0) == [0] and responsible("far", 1) == [0] and responsible("far", 0) == []


def test_over_which_shards_a_gradient_is_summed() -> None:
    pairs = Shard(0, 4, (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),)), summed=True)
    norm = Shard.replicated((4,), 4, summed=True)
    alike = Shard.replicated((4,), 4)
    shards = {"rows": Shard.even(0, 8, 4), "pairs": pairs, "norm": norm, "alike": alike}
    placement = sharded([["rows", "pairs", "norm", "alike"]], 1, **shards)
    for tp in range(4):
        here = Submesh(pp=(0,), tp=(0, 1) if tp < 2 else (2, 3))
        assert placement.shared(tp) == {"pairs": here, "norm": Submesh(pp=(0,), tp=(0, 1, 2, 3))}
        assert placement.summed_over("rows", tp) == placement.summed_over("alike", tp) == Submesh(pp=(0,), tp=(tp,))
    wide = [Submesh(pp=(0,), tp=(0, 1)), Submesh(pp=(0,), tp=(0, 1, 2, 3)), Submesh(pp=(0,), tp=(2, 3))]
    assert placement.submeshes() == wide


def test_a_tie_over_stages_is_summed_by_each_shard_for_itself() -> None:
    placement = placed([["embed.weight"], ["head.weight"]], 2)
    plain = placement.sharded(ShardingPlan(tp=2))
    rows = placement.sharded(ShardingPlan(tp=2, shards={"embed.weight": Shard.even(0, 8, 2)}))
    both = placement.sharded(ShardingPlan(tp=2, shards={"embed.weight": Shard.replicated((8,), 2, summed=True)}))
    for tp in range(2):
        here = {"embed.weight": Submesh(pp=(0, 1), tp=(tp,))}
        assert plain.shared(tp) == rows.shared(tp) == here
        assert both.shared(tp) == {"embed.weight": Submesh(pp=(0, 1), tp=(0, 1))}
    assert plain.submeshes() == [Submesh(pp=(0, 1), tp=(0,)), Submesh(pp=(0, 1), tp=(1,))]
