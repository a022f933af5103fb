"""What TP.sync is expected to cost: the bytes that travel, what is decided by that, what is said across hosts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fold3d
from fold3d.comms import connections
from fold3d.engine.planning import cut_model, planner
from fold3d.observe.step_breakdown import StepOutput
from fold3d.plan.costs import Profile
from fold3d.plan.space.tp_overlap import KNOB
from fold3d.profile.network import ShardLink
from tests.helpers import models
from tests.helpers.ranks import RankPool

SAMPLES, LENGTH = 4, 16


def train(patch: pytest.MonkeyPatch, overlap: str) -> tuple[str, StepOutput, Any, list[str]]:
    """Returns the way of hiding TP.sync, one step, what was forecast, and warnings about hosts."""
    told: list[str] = []
    forecasts: list[Any] = []
    predict = cut_model.predict_tp_sync

    def predicted(*args: Any) -> Any:
        strategy, forecast = predict(*args)
        forecasts.append(forecast)
        return strategy, forecast

    patch.setattr(cut_model, "predict_tp_sync", predicted)
    patch.setattr(connections.logger, "warning", lambda text, *values: told.append(text % values))
    ids = torch.randint(0, 40, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    engine = fold3d.Engine(
        models.build(models.MODELS["llama"](layers=2)),
        fold3d.ParallelConfig(tp=2, segments=1, tp_overlap=overlap, sequence_parallel=False),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        example=batch,
    )
    output = engine.step(batch)
    way = KNOB.of(engine.strategy)
    _ = output.breakdown
    engine.close()
    return way, output, forecasts[0], told


def across_hosts() -> tuple[int, int, float, list[str]]:
    """Returns bytes forecast and sent, seconds forecast, and what was said, where each rank is a host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "host_identity", lambda: f"host {dist.get_rank()}")
        _, output, forecast, told = train(patch, "none")
    return forecast.bytes, output.breakdown.tp_bytes, forecast.exposed, told


def test_bytes_are_those_that_travel_and_the_warning_has_their_cost(ranks: RankPool) -> None:
    first, second = ranks.run(across_hosts, 2)
    forecast, sent, exposed, told = first
    assert forecast > 0 and 0 < exposed < 10
    assert forecast == pytest.approx(sent, rel=0.1), "the loss's two numbers per token are not forecast"
    (text,) = told
    assert "tp=2: a tensor-parallel group is spread over 2 hosts" in text
    assert "a step from each process, at the measured " in text and f"waits about {1e3 * exposed:.0f} ms" in text
    assert second[:3] == (forecast, sent, exposed) and second[3] == []


def decided(bandwidth: float, factor: float) -> tuple[str, Any]:
    """Returns the way that is taken on links of this speed, where halves take `factor` times as long."""
    measure = planner.profile_model

    def profile(*args: Any, **kwargs: Any) -> Profile:
        found = measure(*args, **kwargs)  # times of a busy machine differ from one moment to the next
        layers = len(found.forward)
        return replace(found, forward=(1e-3,) * layers, backward=(2e-3,) * layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "profile_model", profile)
        patch.setattr(planner, "tp_link", lambda *_: ShardLink(bandwidth, 1e-7))
        patch.setattr(planner, "halves_factor", lambda *_: factor)
        way, _, forecast, told = train(patch, "auto")
    assert not told
    return way, forecast


@pytest.mark.parametrize(("bandwidth", "factor", "way"), [("as computing", 1.0, "sub"), (1e12, 1.0, "auto")])
def test_a_clear_prediction_needs_no_trial(ranks: RankPool, bandwidth: float | str, factor: float, way: str) -> None:
    """Links as slow as computing are made of what a first run measured."""
    if isinstance(bandwidth, str):
        ((_, forecast), *_) = ranks.run(decided, 2, 1e6, 1.0)
        bandwidth = forecast.bytes / max(1e-4, forecast.computing)
    results = ranks.run(decided, 2, bandwidth, factor)
    assert [found for found, _ in results] == [way] * 2
