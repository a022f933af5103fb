"""Replanner: predicts steps from measured times of layers and links, and changes what can be changed between two steps
when the times drift: the order of gathers, schedule and N, and how many samples pass the model at once (Ada-Grouper).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import mean, median
from typing import Any

import torch

from fold3d.comms.connections import uses_tcp
from fold3d.comms.groups import Groups
from fold3d.config import ParallelConfig
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.observe.announce import announce
from fold3d.observe.link_times import LinkTimes, rates_of
from fold3d.observe.step_breakdown import NS_PER_MS, RawRecord, merged, without
from fold3d.plan.cluster_model import BucketCost, ClusterCosts, Work
from fold3d.plan.costs import pause_bytes
from fold3d.plan.job import TrainingJob
from fold3d.plan.measured import plan_gathers
from fold3d.plan.micro_batch_size import in_parts, memory_curve
from fold3d.plan.proposal import Proposal
from fold3d.plan.search import recheck
from fold3d.plan.simulator import Prediction
from fold3d.plan.space.dp_sync import gradient_share
from fold3d.plan.strategy import Strategy
from fold3d.profile.network import probe_network
from fold3d.schedule import Kind, Schedule, parse_action
from fold3d.topology import Topology, of_stage, stage_of

logger = logging.getLogger(__name__)

FIRST_STEPS = 3
"""Steps that are measured before the first plan; the first of them, which warms up, does not count."""
EVERY = 50
"""Steps between looks at whether the times are still what the plan was made for; between the first ones fewer."""
SAMPLE = 10
"""Of so many steps between looks one is examined; of the others the length is enough."""
DRIFT = 0.1
"""By which part steps may differ from the prediction, or from what they took at the last look, before there is another
look."""
RECENT = 5
"""Steps whose median is compared; also those of which the times of links are, and after which the ranks ask each other
whether anybody's steps drift."""
SLOWER = 0.8
"""Of the speed at the first look: what has less left became slower; above, the measurement varies."""
_MOST_WAITING = 0.95
"""Of a chunk's time, for TP.sync; more comes of dividing a stage's waits among its chunks."""
_PROBE_SECONDS = 0.5
_LOCAL = 1e10
"""Bytes per second where nothing was sent yet."""


class Replanner:
    """Of one rank; all ranks of the job call the same methods at the same steps."""

    def __init__(
        self,
        topology: Topology,
        groups: Groups,
        config: ParallelConfig,
        device: torch.device,
        proposed: tuple[TrainingJob, Proposal] | None,
        *,
        has_times: bool = True,
        resizes: bool = False,
    ):
        """Args:
        proposed: what the planner was told, of whole micro-batches, and said, if it may choose another schedule; the
            same on every rank.
        resizes: it may also choose another number of samples that pass the model at once.
        has_times: what is recorded is when things happened: on the CPU, and where a device's events tell the time.
        """
        self._planned_job = None if proposed is None else proposed[0]
        self.size = None if proposed is None else proposed[1].micro_batch_size or proposed[0].samples
        """Samples that pass the model at once; None: nobody knows."""
        self._resizes = resizes
        self._sizes: list[int] | None = None  # that are worth a try
        self._topology, self._groups, self._config, self._device = topology, groups, config, device
        self._links: tuple[float, float, float] | None = None  # bandwidth, latency, hop latency
        self._first_rates: list[float] | None = None  # as `_rates` returns them
        self._steps = 0
        self._since = 0  # steps measured for the next look
        self._until = FIRST_STEPS - 1  # so many steps
        self._unasked = 0  # steps since the ranks have asked each other
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._others: list[float] = []
        self._usual: float | None = None  # milliseconds of a step at the last look
        self._times: dict[tuple[int, str], list[float]] = {}
        self._is_old = False  # the times are of before the last look
        self._drifted = False  # so did the last step that was observed, see `_drifts`
        self._exposed_tp: list[float] = []
        self._links_now = LinkTimes(RECENT)
        self._activation_bytes: dict[int, int] = {}
        self._stash_bytes: dict[int, int] = {}
        self._copy_rate = 0.0  # bytes per second
        self.expected: Prediction | None = None
        """What the simulator says of the run as it is; with what it does not simulate in `step_ms`."""
        # Else the recorded times are those of launching kernels; the planner's, which waited for them, are better.
        self._stays = not has_times
        if self._stays and proposed is not None:
            self.expected = proposed[1].prediction

    def observe(self, records: Sequence[RawRecord], step_ms: float, exposed_tp_ms: float | None = None) -> None:
        """Takes in what a step recorded.

        Args:
            exposed_tp_ms: for how long its forwards and backwards waited for TP.sync; None: nobody counts that.
        """
        self._steps += 1
        if self._steps == 1:
            return
        self._recent.append(step_ms)
        if self._stays:
            return
        self._links_now.observe(records)
        self._since += 1
        self._unasked += 1
        drifted, self._drifted = self._drifted, self._drifts
        if self.expected is not None and self._times and self._since % SAMPLE != 0 and not self._drifted:
            return
        if self._is_old or (self._drifted and not drifted):  # what was measured before says nothing of these steps
            self._times, self._exposed_tp, self._others, self._is_old = {}, [], [], False
        busy = merged([(start, end) for lane, _, start, end, _ in records if lane in ("compute", "wait")])
        self._others.append(max(0.0, step_ms - sum(end - start for start, end in busy) / NS_PER_MS))
        arbiters = [(start, end) for lane, action, start, end, _ in records if lane == "wait" and "GATHER" in action]
        spent: dict[tuple[int, str, int], float] = {}
        for lane, text, start, end, size in records:
            if lane == "compute":
                action = parse_action(text)
                key = (action.chunk, "F" if action.kind == Kind.FORWARD else "B", action.micro_batch)
                seconds = sum(b - a for a, b in without([(start, end)], arbiters)) / 1e9
                spent[key] = spent.get(key, 0.0) + seconds  # the halves of a split backward are one
            elif lane == "send_f":
                chunk = _chunk_of(text)
                self._activation_bytes[chunk] = max(size, self._activation_bytes.get(chunk, 0))
            elif lane == "offload" and (action := parse_action(text)).kind == Kind.OFFLOAD:
                self._stash_bytes[action.chunk] = max(size, self._stash_bytes.get(action.chunk, 0))
                # The fastest: others shared the link with a copy the other way.
                self._copy_rate = max(self._copy_rate, 1e9 * size / max(1, end - start))
        if exposed_tp_ms is not None:
            self._exposed_tp.append(exposed_tp_ms)
        for (chunk, kind, _), seconds in spent.items():
            self._times.setdefault((chunk, kind), []).append(seconds)

    @property
    def is_due(self) -> bool:
        """Whether it is time for `look`; the same on all ranks."""
        if self._stays or not self._times:
            return False
        return self._unasked > 0 and (self._since >= self._until or self._unasked >= RECENT)

    @property
    def _drifts(self) -> bool:
        """Whether this rank's last steps took otherwise than at the last look."""
        if self._usual is None or len(self._recent) < RECENT:
            return False
        return abs(median(self._recent) / self._usual - 1) > DRIFT

    @property
    def believed(self) -> Prediction | None:
        """What is expected of a step, unless the latest steps say otherwise."""
        if self.expected is None or not self._recent:
            return self.expected
        return self.expected if abs(median(self._recent) / self.expected.step_ms - 1) <= DRIFT else None

    def look(
        self, strategy: Strategy, schedule: Schedule, sync: DpSync | None, *, divides: bool = False
    ) -> Strategy | None:
        """Predicts the step, and plans again where that is worth it; all ranks of the job call, between steps. Where it
        is not time for more, the ranks only ask each other whether steps take otherwise than they did.

        Args:
            divides: whether this rank's micro-batches can be divided.
        Returns: a strategy that is better for the times measured, to be followed from now with micro-batches of `size`.
        """
        self._unasked = 0
        if self._since < self._until and not self._groups.world.decide(self._drifts, any):
            return None
        if self._links is None:
            if sync is not None:
                sync.settle()  # what is still on its way would be measured, too
            self._links = self._probe()
        found = self._groups.world.decide(
            self._share(sync, divides), lambda shares: self._expect(strategy, schedule, shares)
        )
        self._is_old, self._since, self._usual = True, 0, median(self._recent or [0.0])
        self._until = min(EVERY, max(SAMPLE, 2 * self._until))
        if found is None:
            return None
        self.expected, better, size = found
        if not self._config.retune:
            return None
        if size != self.size:
            self.size, self._times = size, {}
        if replace(better, gather_order=strategy.gather_order) != strategy:
            self._usual = self.expected.step_ms
            self._recent.clear()
        return better

    def _share(self, sync: DpSync | None, divides: bool = False) -> dict[str, Any]:
        """Returns what rank 0 must know of this rank."""
        buckets: dict[int, list[tuple[int, str]]] = {}
        if sync is not None:
            sizes: dict[tuple[int, int], tuple[int, str]] = {}
            for bucket, mode in zip(sync.buckets, sync.plan.modes, strict=True):
                key = (bucket.spec.chunk, bucket.spec.planned)
                size = sizes.get(key, (0, ""))[0] + bucket.gradients.nbytes
                sizes[key] = (size, "serial" if sync.plan.serial else mode)
            for (chunk, _), entry in sorted(sizes.items()):
                buckets.setdefault(chunk, []).append(entry)
        return {
            "times": {key: mean(values) for key, values in self._times.items()},
            "exposed_tp": mean(self._exposed_tp) / 1e3 if self._exposed_tp else None,
            "activations": self._activation_bytes,
            "stashes": self._stash_bytes,
            "copy_rate": self._copy_rate,
            "buckets": buckets,
            "bandwidth": 0.0 if sync is None else sync.bandwidth(),
            "sustained": 0.0 if sync is None else sync.bandwidth(sustained=True),
            "by_library": sync is not None and sync.by_library,
            "divides": divides,
            "links": self._links_now.traffic(),
            "step_ms": median(self._recent or [0.0]),
            "other_ms": mean(self._others) if self._others else 0.0,
        }

    def _expect(
        self, strategy: Strategy, schedule: Schedule, shares: Sequence[dict[str, Any]]
    ) -> tuple[Prediction, Strategy, int | None] | None:
        """Returns a new expectation and what is then to be done, with micro-batches of which size; None when the
        present expectation still holds."""
        longest = max(share["step_ms"] for share in shares)
        if self.expected is not None and abs(longest / self.expected.step_ms - 1) <= DRIFT:
            return None
        if self.expected is not None:
            logger.info(
                "steps take %.1f ms instead of the predicted %.1f: planning again", longest, self.expected.step_ms
            )
        assert self._links is not None
        # Loss, norm and what Python does between actions are not simulated. Ranks that are early wait there for others.
        other_ms = min(share["other_ms"] for share in shares)
        stages = [
            [share for rank, share in enumerate(shares) if self._topology.coordinates(rank).pp == stage]
            for stage in range(self._topology.pp)
        ]
        chunks = range(schedule.pp * schedule.segments)

        def of_chunk(chunk: int) -> list[dict[str, Any]]:
            return stages[stage_of(chunk, schedule.pp, schedule.style)]

        def time_of(chunk: int, kind: str) -> float:
            values = [share["times"].get((chunk, kind), 0.0) for share in of_chunk(chunk)]
            return max(1e-9, float(mean(values)))

        measured_rate = [share["bandwidth"] for share in shares if share["bandwidth"] > 0]
        forward = tuple(time_of(chunk, "F") for chunk in chunks)
        backward = tuple(time_of(chunk, "B") for chunk in chunks)
        waits = _spread_waits([_stage_waits(stage) for stage in stages], strategy, schedule, forward, backward)
        # The fastest: a rank measures too little where its neighbour was not ready, or its two rings shared the link.
        bandwidth = max([*measured_rate, self._links[0]]) * self._slowdown(shares)
        links = None
        if self._topology.pp > 1 and len(chunks) > 1:
            links = rates_of([share["links"] for share in shares], len(chunks) - 1, bandwidth)
        if self._planned_job is not None and self._config.retune:
            network = self._planned_job.network
            if bandwidth < self._links[0]:
                network = replace(network, dp_bandwidth=bandwidth)
            job = replace(self._planned_job, network=network, links=links)
            times = tuple([1e3 * time for time in of] for of in (forward, backward))
            tp_ms = None if waits is None else ([1e3 * time for time in waits[0]], [1e3 * time for time in waits[1]])
            resizes = self._resizes and all(share["divides"] for share in shares)
            better = self._better(job, strategy, schedule, times[0], times[1], tp_ms, resizes=resizes)
            if better is not None:
                size = better.micro_batch_size or self.size
                announce(
                    logger,
                    f"the planner changed its mind at step {self._steps}: with measured times {better.strategy.name}"
                    + (f" in micro-batches of {size} samples" if size != self.size else "")
                    + f" (predicted {better.step_ms:.1f} ms a step) is faster than {strategy.name}; pin it with "
                    f"{better.flags}",
                )
                return _longer(better.prediction, other_ms), better.strategy, size
        buckets = [of_chunk(chunk)[0]["buckets"].get(chunk, ()) for chunk in chunks]
        work = Work(
            forward=forward,
            backward=backward,
            forward_tp=() if waits is None else waits[0],
            backward_tp=() if waits is None else waits[1],
            activation_bytes=tuple(
                max(share["activations"].get(chunk, 0) for share in of_chunk(chunk)) for chunk in chunks
            ),
            stash_bytes=tuple(max(share["stashes"].get(chunk, 0) for share in of_chunk(chunk)) for chunk in chunks),
            buckets=tuple(
                tuple(BucketCost(forward[chunk] / len(mine), backward[chunk] / len(mine), size) for size, _ in mine)
                for chunk, mine in enumerate(buckets)
            ),
            style=schedule.style,
        )
        # At the best speed more gathers would fit beside the backward than really do, and delay what it has summed.
        sustained = min(bandwidth, max(share["sustained"] for share in shares) or bandwidth)
        cluster = ClusterCosts(
            dp=self._topology.dp,
            bandwidth=sustained,
            latency=self._links[1],
            hop_latency=self._links[2],
            slice_bytes=pause_bytes(sustained),
            preempt=self._config.preempt,
            copies_share=True,
            gradient_share=gradient_share(self._config.dp_sync_dtype),
            gradient_delay=self._config.gradient_delay,
            links=links,
        )
        if copy_rates := [share["copy_rate"] for share in shares if share["copy_rate"] > 0]:
            cluster = replace(cluster, copy_bandwidth=min(copy_rates))
        modes = [
            [mode for mine in of_stage(buckets, stage, schedule.pp, schedule.style) for _, mode in mine]
            for stage in range(schedule.pp)
        ]
        expected = _longer(plan_gathers(schedule, work, cluster, modes), other_ms)
        logger.info("measured %.1f ms a step, predicted %.1f ms", longest, expected.step_ms)
        gathers = expected.gather_order if any(expected.gather_order) else ()
        return expected, replace(strategy, gather_order=gathers), self.size

    def _better(
        self,
        whole: TrainingJob,
        strategy: Strategy,
        schedule: Schedule,
        forward_ms: Sequence[float],
        backward_ms: Sequence[float],
        tp_ms: tuple[Sequence[float], Sequence[float]] | None,
        *,
        resizes: bool,
    ) -> Proposal | None:
        """Returns what `recheck` finds, of micro-batches of all sizes that are worth a try.

        Args:
            whole: of micro-batches that are not divided.
        """
        job = whole if self.size is None or whole.samples is None else in_parts(whole, self.size)
        if schedule.micro_batches != job.micro_batches:  # the last step of an epoch
            return None
        if not resizes:
            return recheck(job, strategy, forward_ms, backward_ms, tp_ms)
        if self._sizes is None:
            self._sizes = memory_curve(whole, strategy)
        others = [in_parts(whole, size) for size in self._sizes if size != self.size]
        return recheck(job, strategy, forward_ms, backward_ms, tp_ms, others)

    def _slowdown(self, shares: Sequence[dict[str, Any]]) -> float:
        """Returns the part of its speed at the first look that the slowest link has left; 1.0: it is about as fast."""
        rates = self._rates(shares)
        if self.expected is None or self._first_rates is None:
            self._first_rates = rates
        pairs = zip(rates, self._first_rates, strict=True)
        slowest = min((now / first for now, first in pairs if now > 0 and first > 0), default=1.0)
        return slowest if slowest < SLOWER else 1.0

    def _rates(self, shares: Sequence[dict[str, Any]]) -> list[float]:
        """Returns bytes per second, 0.0 where nothing was measured: of each rank's own line in its ring; of a library's
        collectives, which all replicas of a stage move together, what the replica measured that waited least for the
        others."""
        fastest: dict[tuple[int, ...], float] = {}
        for rank, share in enumerate(shares):
            place = self._topology.coordinates(rank)
            key = (place.pp, place.tp) if share["by_library"] else (place.pp, place.tp, place.dp)
            fastest[key] = max(share["bandwidth"], fastest.get(key, 0.0))
        return list(fastest.values())

    def _probe(self) -> tuple[float, float, float]:
        """Returns bandwidth (bytes per second), latency of a message and of a hop of the rings (seconds)."""
        if self._topology.world == 1:
            return _LOCAL, 0.0, 0.0
        if self._planned_job is not None:
            links = self._planned_job.network
        else:
            links = probe_network(
                self._groups,
                self._config.timeout_seconds,
                over_tcp=uses_tcp(self._config.transport, self._device),
                activation_bytes=max(self._activation_bytes.values(), default=0),
                seconds=_PROBE_SECONDS,
            )
        rate = links.bandwidth if math.isfinite(links.bandwidth) else _LOCAL
        return rate, links.pp_latency, links.hop_latency


def _longer(prediction: Prediction, other_ms: float) -> Prediction:
    """Returns what to expect of a step that has so much in it which is not simulated."""
    return replace(prediction, step_ms=prediction.step_ms + other_ms)


def _stage_waits(shares: Sequence[dict[str, Any]]) -> float | None:
    """Returns the seconds of a step for which the ranks of a stage wait for TP.sync; None where nobody counts them."""
    known = [share["exposed_tp"] for share in shares if share["exposed_tp"] is not None]
    return float(mean(known)) if known else None


def _spread_waits(
    per_stage: Sequence[float | None],
    strategy: Strategy,
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Returns by chunk which part of a micro-batch's forward and backward is waiting for TP.sync; None: nobody knows.

    A stage's waits are counted together. Its blocks are alike, so they share them; of what a chunk has, its forward and
    its backward have as much as they have of its time.
    """
    if None in per_stage:
        return None
    waits: list[tuple[float, float]] = []
    for chunk, (first, end) in enumerate(strategy.ranges):
        stage = stage_of(chunk, schedule.pp, schedule.style)
        blocks = sum(b - a for a, b in of_stage(strategy.ranges, stage, schedule.pp, schedule.style))
        mine = (per_stage[stage] or 0.0) * ((end - first) / blocks if blocks else 0.0) / schedule.micro_batches
        share = min(_MOST_WAITING, mine / (forward[chunk] + backward[chunk]))
        waits.append((share * forward[chunk], share * backward[chunk]))
    return tuple(a for a, _ in waits), tuple(b for _, b in waits)


@cache  # every step has the same actions
def _chunk_of(action: str) -> int:
    return parse_action(action).chunk
