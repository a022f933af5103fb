"""partition="graph" and partition=[names]: models without a list of equal blocks, cut and compared with themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from fold3d import ConfigError, Engine, ParallelConfig, TraceError
from fold3d.engine.planning.agreed_recording import agreed_graph
from fold3d.placement.partition import split_ranges
from fold3d.trace import Trace, trace
from tests.trace.chains import assert_equal, chained, ranks_of, whole
from tests.trace.graphs import MODELS, build


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", MODELS)
def test_four_chunks_on_two_stages_equal_the_whole_model(family: str) -> None:
    model, batch = build(family)
    recorded = trace(model, partition="graph", example=batch)
    ranges = split_ranges(recorded, 4)
    want = whole(model, batch)
    assert_equal(chained(ranks_of(model, recorded, ranges, 2), recorded, 4, batch), want, 1e-10)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", ["residual", "skipping", "segformer"])
def test_every_open_cut_is_exact(family: str) -> None:
    model, batch = build(family)
    recorded = trace(model, partition="graph", example=batch)
    places = [0, *(k for k, reason in enumerate(recorded.borders) if k and not reason), len(recorded.blocks)]
    ranges = list(pairwise(places))
    ranks = ranks_of(model, recorded, ranges, len(ranges))
    assert_equal(chained(ranks, recorded, len(ranges), batch), whole(model, batch), 1e-10)


@pytest.mark.parametrize("family", ["residual", "skipping"])
def test_dropout_is_that_of_one_chunk(family: str) -> None:
    model, batch = build(family, dropout=0.3)
    recorded = trace(model, partition="graph", example=batch)
    key, blocks = (42, 3, 1), len(recorded.blocks)
    want = chained(ranks_of(model, recorded, [(0, blocks)], 1), recorded, 1, batch, key=key)
    ranks = ranks_of(model, recorded, split_ranges(recorded, 4), 2, recompute=True)
    assert_equal(chained(ranks, recorded, 4, batch, key=key), want, 1e-10)


def test_a_module_whose_own_code_adds_stays_whole_and_others_are_opened() -> None:
    model, batch = build("residual")
    recorded = trace(model, partition="graph", example=batch)
    assert {"narrow.0", "narrow.1", "middle.0", "middle.2"} <= set(recorded.blocks)
    assert all(len(crossings) == 1 for crossings in recorded.crossings[1:])


def test_skip_connections_cross_until_they_are_read() -> None:
    model, batch = build("skipping")
    recorded = trace(model, partition="graph", example=batch)
    most = {}
    for name, crossings in zip(recorded.blocks, recorded.crossings, strict=True):
        module = ".".join(name.split(".")[: 2 if name.startswith(("down", "up")) else 1])
        most.setdefault(module, len(crossings))
    # What was pooled from the last one that went down is the last one: it crosses once.
    assert most == {"down.0": 0, "down.1": 1, "down.2": 2, "bottom": 3, "up.0": 4, "up.1": 3, "up.2": 2, "head": 1}


def test_cuts_that_more_crosses_than_a_near_one_are_closed() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.tail = nn.Sequential(nn.Linear(64, 2), nn.Linear(2, 2), nn.Linear(2, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tail(self.second(self.first(x))).sum()

    units, example = ("first", "second", "tail.0", "tail.1", "tail.2"), {"x": torch.zeros(2, 64)}
    recorded = trace(Wide(), partition="graph", example=example)
    assert recorded.blocks == units
    assert "1 tensors of 512 bytes would cross it, and 1 of 16 bytes cross" in recorded.borders[2]
    assert not any(recorded.borders[k] for k in (1, 3, 4))
    assert not any(trace(Wide(), partition=units, example=example).borders)


def test_many_chunks_open_small_modules() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(40)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts(x).sum()

    example = {"x": torch.zeros(2, 4)}
    with pytest.raises(ConfigError, match="60 chunks"):
        split_ranges(trace(Chain(), partition="graph", example=example), 60)
    recorded = trace(Chain(), partition="graph", example=example, chunks=60)
    assert len(recorded.blocks) == 80
    assert len(split_ranges(recorded, 60)) == 60


def test_named_modules() -> None:
    model, batch = build("skipping")
    recorded = trace(model, partition=("down.0", "down.1", "bottom", "up.1"), example=batch)
    assert recorded.blocks == ("down.0", "down.1", "bottom", "up.1")
    ranks = ranks_of(model, recorded, [(k, k + 1) for k in range(4)], 2)
    assert_equal(chained(ranks, recorded, 4, batch), whole(model, batch), 1e-10)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["down.7"], "no module of that name; it has down"),
        (["down.0", "down.0.1"], "both 'down.0' and 'down.0.1'"),
        (["down.0", "down.0"], "'down.0' twice"),
        (["down"], "'down' did not run"),
    ],
)
def test_names_that_cannot_be_blocks(names: list[str], message: str) -> None:
    model, batch = build("skipping")
    with pytest.raises(TraceError, match=message):
        trace(model, partition=names, example=batch)


def test_no_place_to_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(TraceError, match=r'partition="graph" found no place to cut Sequential'):
        trace(model, partition="graph", example={"input": torch.zeros(1, 4)})
    with pytest.raises(TraceError, match='partition="graph"'):
        trace(model, example={"input": torch.zeros(1, 4)})


@pytest.mark.parametrize("partition", ["graph", ["stem", "narrow", "middle", "wide"]])
def test_an_engine_trains_as_the_model_does(partition: str | list[str]) -> None:
    losses = []
    for settings in ({"segments": 2, "partition": partition}, {"segments": 1}):
        model, batch = build("residual")
        engine = Engine(
            model,
            ParallelConfig(micro_batches=2, **settings),
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            example=batch,
        )
        losses.append([float(engine.step(batch).loss) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert losses[0][2] < losses[0][0]


def test_replicas_take_the_modules_that_rank_0_chose() -> None:
    class World:
        """Rank 0 has chosen other modules."""

        patience = 1.0

        def __init__(self, chosen: Trace) -> None:
            self._chosen = chosen

        def share(self, value: object, timeout: float) -> object:
            return self._chosen.blocks, self._chosen.borders

    model, batch = build("residual")
    mine = trace(model, partition="graph", example=batch)
    assert agreed_graph(model, mine, World(mine), batch) is mine  # type: ignore[arg-type]
    other = trace(model, partition=("stem", "narrow", "middle", "wide"), example=batch)
    other = replace(other, borders=("", "", "more crosses it", ""))
    found = agreed_graph(model, mine, World(other), batch)  # type: ignore[arg-type]
    assert (found.blocks, found.borders) == (other.blocks, other.borders)
    ranges = split_ranges(found, 3)
    assert_equal(chained(ranks_of(model, found, ranges, 3), found, 3, batch), whole(model, batch), 1e-10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": ""}, "partition=''"),
        ({"partition": []}, r"partition=\[\]"),
        ({"partition": 3}, "partition=3: must be"),
        ({"partition": "graph", "blocks": "layers"}, "blocks='layers' has no effect with partition='graph'"),
        ({"partition": "graph", "tp": 2}, 'set tp=1, or partition="blocks"'),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**settings)
