"""Fold3dRank: fold3d on one rank, through its public Engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fold3d
from benchmarks.cluster.on_rank.copies import copies_at
from benchmarks.cluster.on_rank.host_time import exposed_host_ms
from benchmarks.cluster.on_rank.virtual_layer import VirtualModel, make_batch
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import COMM_TIMEOUT, LANES, LEARNING_RATE, Record, System
from fold3d import _C
from fold3d.observe.step_breakdown import StepOutput


class Fold3dRank:
    """Trains the scenario's model with fold3d; all ranks make the same calls."""

    def __init__(self, scenario: Scenario, system: System) -> None:
        family = system.family
        device = torch.device(system.device, 0) if system.device == "sim" else torch.device("cpu")
        config = fold3d.ParallelConfig(
            dp=scenario.dp,
            pp=scenario.pp,
            segments="auto" if family.schedule == "auto" else system.segments,
            micro_batches=scenario.micro_batches,
            schedule=family.schedule,
            group_size=system.group_size(scenario),
            dp_sync=family.dp_sync,
            gradient_delay=family.gradient_delay,
            # A layer is a bucket, as for the peers; where all is planned, so is this.
            bucket_bytes=None if family.schedule == "auto" else 1,
            preempt=family.preempt,
            recompute=family.recompute,
            offload=family.offload,
            memory_limit=scenario.memory_limit if family.offload == "auto" else None,
            blocks="layers",
            comm_timeout=COMM_TIMEOUT,
        )
        self._waits, self._device = family.waits, device
        self._waited_ms = 0.0
        self._batch = {"x": make_batch(scenario, device)}
        self._outputs: list[StepOutput] = []
        self._copies = ExitStack()
        self._copies.enter_context(copies_at(scenario.copy_rate))
        self._counts = scenario.saved_bytes > 0 and _C.count_cpu_bytes(True)
        self._before = _C.live_cpu_bytes()  # what is left of systems before
        self._engine = fold3d.Engine(
            VirtualModel(scenario),
            config,
            optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
            example={"x": self._batch["x"][:1]},
            device=device,
        )

    def step(self) -> None:
        """Runs Engine.step, which also takes the exact global gradient norm."""
        self._outputs.append(self._engine.step(self._batch))
        if self._waits:
            start = time.perf_counter()
            self._engine.flush()
            self._waited_ms = (time.perf_counter() - start) * 1e3

    def warmed_up(self) -> None:
        """Drops what was recorded so far."""
        self._outputs.clear()
        _C.reset_peak_cpu_bytes()
        if self._waits:
            _gather_as_reduced(self._engine)  # only now: fold3d plans its own order first

    def records(self) -> Sequence[Sequence[Record]]:
        """Returns each step's records of computing, receiving and DP.sync."""
        return [
            [(lane, action, start, end) for lane, action, start, end, _ in output.breakdown.records if lane in LANES]
            for output in self._outputs
        ]

    def breakdown(self) -> dict[str, float]:
        """Returns the last step's breakdown; with what was waited for after it, where that is part of the step. In
        scenarios whose layers save something with what tensors held at most and what was in the pool, 10^6 bytes."""
        account = self._outputs[-1].breakdown
        breakdown = account.log(dp=2, pp=2)  # all keys, whatever the layout
        if self._counts:
            breakdown |= {
                "device_mb": (_C.peak_cpu_bytes() - self._before) / 1e6,
                "pool_mb": account.pool_peak_bytes / 1e6,
            }
        if self._device.type != "cpu":
            breakdown["host_exposed_ms"] = exposed_host_ms(account)
        for name in ("step_ms", "dp_exposed_ms"):
            breakdown[name] = round(breakdown[name] + self._waited_ms, 1)
        return breakdown

    def timeline(self) -> Sequence[Sequence[Any]]:
        """Returns the last step's records, with the waits of who reads weights after it."""
        return self._engine.breakdown().records

    def choice(self) -> dict[str, Any]:
        """Returns replica, segments, schedule, N, and DP.sync of each bucket."""
        strategy, sync = self._engine.strategy, _dp_sync(self._engine).plan
        return {
            "replica": self._engine.topology.dp_rank,
            "segments": strategy.segments,
            "schedule": strategy.schedule,
            "group_size": strategy.group_size,
            "memory": {name: dict(strategy.settings)[name] for name in ("recompute", "offload")},
            "modes": ["serial"] * len(sync.modes) if sync.serial else list(sync.modes),
            "gather_order": list(sync.gather_order),
        }

    def close(self) -> None:
        """Ends communication once no rank needs it any more."""
        self._engine.flush()
        dist.barrier()
        self._engine.close()
        self._copies.close()
        if self._counts:
            _C.count_cpu_bytes(False)


def _gather_as_reduced(engine: fold3d.Engine) -> None:
    """Makes DP.sync a plain all-reduce of each bucket as it is produced: the best for one who waits for all of them.

    fold3d itself has no use for that order and no setting; it gathers first what the next forward needs first.
    """
    sync = _dp_sync(engine)
    sync.reschedule(tuple(reversed(range(len(sync.buckets)))))


def _dp_sync(engine: fold3d.Engine) -> Any:
    """Returns the inside that has no public name."""
    assert engine._rank is not None
    return engine._rank.sync
