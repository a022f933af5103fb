"""Fold3dRank: fold3d on one rank, through its public Engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import fold3d
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import COMM_TIMEOUT, LEARNING_RATE, Record
from benchmarks.cluster.virtual_layer import VirtualModel, make_batch


class Fold3dRank:
    """Trains the scenario's model with fold3d; all ranks make the same calls."""

    def __init__(self, scenario: Scenario, schedule: str, segments: int) -> None:
        config = fold3d.ParallelConfig(
            dp=scenario.dp,
            pp=scenario.pp,
            segments=segments,
            micro_batches=scenario.micro_batches,
            schedule=schedule,
            blocks="layers",
            comm_timeout=COMM_TIMEOUT,
        )
        self._batch = {"x": make_batch(scenario)}
        self._engine = fold3d.Engine(
            VirtualModel(scenario),
            config,
            optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
            example={"x": self._batch["x"][:1]},
        )

    def step(self) -> None:
        """Runs Engine.step, which also takes the exact global gradient norm."""
        self._engine.step(self._batch)

    def records(self) -> Sequence[Record]:
        """Returns the last step's records of computing, receiving and summing."""
        account = self._engine.account()
        return [
            (lane, action, start, end)
            for lane, action, start, end, _ in account.records
            if lane in ("compute", "recv_f", "recv_b", "reduce")
        ]

    def close(self) -> None:
        """Closes the Engine."""
        self._engine.close()
