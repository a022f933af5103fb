"""What crosses each border in a step is what the recording says."""

from __future__ import annotations

import pytest

import fold3d
from fold3d.placement.partition import split_ranges
from fold3d.trace import trace
from tests.helpers.models import MODELS, build
from tests.helpers.ranks import RankPool
from tests.trace import graphs, stacks

KINDS = ["gpt2", "t5", "skipping"]


def model_of(kind: str):  # type: ignore[no-untyped-def]
    """Returns the model, a batch and the setting `partition`."""
    if kind in MODELS:
        ids = stacks.tokens(2, 9, 1)
        return build(MODELS[kind]()), {"input_ids": ids, "labels": ids}, "blocks"
    if kind in stacks.MODELS:
        return *stacks.build(kind), "blocks"
    return *graphs.build(kind), "graph"


def step(kind: str) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Returns the blocks of each chunk, and the bytes of each message that this rank sent, forwards and backwards."""
    model, batch, partition = model_of(kind)
    config = fold3d.ParallelConfig(pp=2, segments=2, micro_batches=1, partition=partition, comm_timeout=60.0)
    engine = fold3d.Engine(model, config, example=batch)
    engine.run([batch], loss)
    records, ranges = engine.breakdown().records, list(engine.strategy.ranges)
    engine.close()
    forwards = [size for lane, _, _, _, size in records if lane == "send_f"]
    backwards = [size for lane, _, _, _, size in records if lane == "send_b"]
    return ranges, forwards, backwards


def loss(model, batch):  # type: ignore[no-untyped-def]
    """Returns it."""
    result = model(**batch)
    return getattr(result, "loss", result)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_as_large_as_the_recording_says(ranks: RankPool, kind: str) -> None:
    model, batch, partition = model_of(kind)
    recorded = trace(model, partition=partition, example=batch)
    found = ranks.run(step, 2, kind)
    assert found[0][0] == split_ranges(recorded, 4)
    borders = [recorded.crossings[first] for first, _ in found[0][0][1:]]
    expected = sorted(sum(one.bytes for one in border) for border in borders)
    assert sorted(size for _, forwards, _ in found for size in forwards) == expected
    # Of what nothing in front was trained for (T5's mask in the form of a position bias) no gradient comes back.
    gradients = sorted(size for _, _, backwards in found for size in backwards)
    assert len(gradients) == len(expected)
    assert all(size <= most for size, most in zip(gradients, expected, strict=True))
    if kind != "t5":
        assert gradients == expected
