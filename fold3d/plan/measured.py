"""plan_gathers(): the order of early gathers and the length of a step, from what a run measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fold3d import _C
from fold3d.plan.simulator import Prediction, RankBreakdown, prediction_of

_NS = 1e9  # nanoseconds per second
_TRIES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run as it is; lists by chunk have an entry for each of the model's chunks."""

    forward: tuple[float, ...]
    """Seconds of one micro-batch."""
    backward: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    buckets: tuple[tuple[tuple[int, bool], ...], ...]
    """By chunk, none where nothing is trained: gradient bytes, and whether parameters are gathered ("zero1") instead of
    gradients."""
    dp: int
    serial: bool
    preempt: bool
    bandwidth: float
    """Bytes per second."""
    latency: float
    """Seconds of a pipeline message besides its bytes."""
    hop_latency: float
    slice_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the simulator says of it."""

    step_ms: float
    stages: tuple[RankBreakdown, ...]
    """Where a rank's time goes, by stage."""
    gather_order: tuple[tuple[int, ...], ...]
    """Per stage: its early buckets in the order of their gathers."""

    @classmethod
    def of(cls, prediction: Prediction, gather_order: tuple[tuple[int, ...], ...]) -> Expected:
        """Returns what `prediction` says of a run whose buckets have other numbers than the simulated ones."""
        return cls(step_ms=prediction.step_ms, stages=prediction.ranks, gather_order=gather_order)

    def longer_by(self, other_ms: float) -> Expected:
        """Returns what to expect of a step that has so much in it which is not simulated."""
        return replace(self, step_ms=self.step_ms + other_ms)


def plan_gathers(schedule: _C.Schedule, measured: Measured) -> Expected:
    """Returns the fastest order of gathers found for a schedule with backwards, and how long a step then takes."""
    model = _model(measured)
    early = model.dp_sync == "early" and measured.dp > 1
    most = max(sum(len(b) for b in measured.buckets[stage :: schedule.pp]) for stage in range(schedule.pp))
    limits = [-1, *range(0, most, max(1, -(-most // _TRIES)))] if early else [-1]
    lengths = []
    for limit in limits:
        model.early_gathers = limit
        lengths.append(_C.simulate_step(schedule, model, breakdown=False).step_ns)
    model.early_gathers = limits[lengths.index(min(lengths))]
    best = prediction_of(_C.simulate_step(schedule, model), early_gathers=None)
    orders = best.gather_order if early else tuple(() for _ in range(schedule.pp))
    numbers = [_real_numbers(measured, stage, schedule.pp) for stage in range(schedule.pp)]
    found = (tuple(real[k] for k in order if k in real) for real, order in zip(numbers, orders, strict=True))
    return Expected.of(best, tuple(found))


def _real_numbers(measured: Measured, stage: int, pp: int) -> dict[int, int]:
    """Returns the simulated number of each of a stage's buckets -> its own; a chunk without any has an empty one."""
    numbers: dict[int, int] = {}
    simulated = 0
    for buckets in measured.buckets[stage::pp]:
        for _ in buckets:
            numbers[simulated] = len(numbers)
            simulated += 1
        simulated += not buckets
    return numbers


def _model(measured: Measured) -> _C.ClusterModel:
    model = _C.ClusterModel()
    model.dp = measured.dp
    model.bandwidth = measured.bandwidth
    model.latency_ns = round(_NS * measured.latency)
    model.hop_latency_ns = round(_NS * measured.hop_latency)
    model.slice_bytes = measured.slice_bytes
    model.preempt = measured.preempt
    model.forward_ns = [round(_NS * seconds) for seconds in measured.forward]
    model.backward_ns = [round(_NS * seconds) for seconds in measured.backward]
    model.activation_bytes = list(measured.activation_bytes)
    model.update_ns = [0] * len(measured.forward)  # it is part of the forwards that were measured
    kinds = {zero1 for chunk in measured.buckets for _, zero1 in chunk}
    model.dp_sync = "serial" if measured.serial else "zero1" if kinds == {True} else "early"
    model.buckets = [
        [
            (round(_NS * forward / len(buckets)), round(_NS * backward / len(buckets)), size, zero1)
            for size, zero1 in buckets
        ]
        or [(round(_NS * forward), round(_NS * backward), 0, False)]
        for forward, backward, buckets in zip(measured.forward, measured.backward, measured.buckets, strict=True)
    ]
    return model
