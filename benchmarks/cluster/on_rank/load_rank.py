"""LoadRank: DP.sync without a pause and messages between stages at a steady pace, by what fold3d trains with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.scenarios import FLOAT_BYTES, Scenario
from benchmarks.cluster.systems import COMM_TIMEOUT, LANES, Record, System
from fold3d import _C, schedule
from fold3d.comms.connections import connect_replicas, connect_stages, find_hosts, join_nic_arbiter
from fold3d.comms.groups import Groups
from fold3d.topology import Topology

_SHARE = 0.4
"""Of the network that the messages take while there are some."""
_ALONE_S = 1.0
"""For how long there are messages where there is no DP.sync."""


class LoadRank:
    """A step is the sum of the scenario's gradients, a bucket per layer, and forward messages from stage to stage.

    Nothing waits for DP.sync and DP.sync waits for nothing, so it always has something to send; the messages leave the
    first stage at fixed times, whatever became of those before, for about as long as DP.sync takes beside them.
    """

    def __init__(self, scenario: Scenario, system: System) -> None:
        world = scenario.ranks
        self._topology = topology = Topology(dp=scenario.dp, pp=scenario.pp, rank=dist.get_rank())
        cpu = torch.device("cpu")
        self._groups = Groups(topology, cpu, COMM_TIMEOUT, (), with_p2p=False)
        arbiter = join_nic_arbiter(topology, self._groups, f"load of {world}", system.family.preempt)
        hosts = find_hosts(self._groups)
        message_s = scenario.activation_bytes * 8 / (scenario.rate_mbit * 1e6)
        self._pace_s = message_s / _SHARE
        seconds = scenario.dp_sync_s / (1 - _SHARE) if scenario.gradient_bytes else _ALONE_S
        messages = max(1, round(seconds / self._pace_s))
        self._order = schedule.lower(schedule.forward_only(scenario.pp, 1, messages), reduce=False)
        self._executor = _C.Executor(
            [_Stage(self, scenario.activation_bytes)],
            topology.pp_rank,
            topology.pp,
            self._groups.p2p_names(),
            cpu,
            COMM_TIMEOUT,
            topology.describe(topology.rank),
            connect_stages(topology, self._groups.world, COMM_TIMEOUT),
            arbiter,
            list(hosts.stages),
        )
        layer_floats = scenario.gradient_bytes // scenario.layers // FLOAT_BYTES // scenario.dp * scenario.dp
        self._buckets = [torch.zeros(layer_floats) for _ in range(scenario.layers if layer_floats else 0)]
        self._sync = None
        if self._buckets:
            self._sync = connect_replicas(
                topology, self._groups, arbiter, cpu, COMM_TIMEOUT, over_tcp=True, hosts=hosts
            )
        self._steps = 0
        self._begun = 0.0
        self._records: list[list[Record]] = []

    def step(self) -> None:
        """Returns when all messages and all sums have arrived here."""
        self._steps += 1
        dist.barrier()
        self._begun = time.perf_counter()
        numbers = list(range(len(self._buckets)))
        if self._sync is not None:
            self._sync.begin(self._steps, numbers)
            for number in numbers:
                self._sync.reduce(number, self._buckets[number], 1.0)
        self._executor.run(self._order, self._topology.pp_rank, False, range(self._order.micro_batches))
        records = [*self._executor.take_spans(), *self._executor.take_records()]
        if self._sync is not None:
            for number in numbers:
                self._sync.wait_gathered(number)
            records += self._sync.take_records()
        self._records.append([(lane, action, start, end) for lane, action, start, end, _ in records if lane in LANES])

    def wait_for(self, micro_batch: int) -> None:
        """Sleeps until message `micro_batch` is due."""
        time.sleep(max(0.0, self._begun + micro_batch * self._pace_s - time.perf_counter()))

    def warmed_up(self) -> None:
        """Drops what was recorded so far."""
        self._records.clear()

    def records(self) -> Sequence[Sequence[Record]]:
        """Returns each step's records."""
        return self._records

    def breakdown(self) -> dict[str, float]:
        """Nothing is computed."""
        return {}

    def timeline(self) -> Sequence[Sequence[Any]]:
        """Returns nothing: no step of a training is run."""
        return []

    def choice(self) -> dict[str, Any]:
        """Nothing is chosen."""
        return {}

    def close(self) -> None:
        """Ends communication."""
        if self._sync is not None:
            self._sync.close()
        self._executor.close()
        self._groups.close()


class _Stage:
    """What the executor runs instead of a part of a model."""

    def __init__(self, load: LoadRank, activation_bytes: int) -> None:
        self._load = load
        self._message = torch.zeros(activation_bytes // FLOAT_BYTES)

    def forward(self, micro_batch: int, received: list[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        """Returns the message: the first stage's when it is due, the others' at once."""
        if not received:
            self._load.wait_for(micro_batch)
        return [self._message], None

    def reduce(self) -> None:
        """Forwards only."""
