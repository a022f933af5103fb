"""DataRank: the whole model on every rank, as torch's DistributedDataParallel and fully_shard train it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster.on_rank.torch_rank import own_group
from benchmarks.cluster.on_rank.virtual_layer import VirtualModel, make_batch
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import LEARNING_RATE, Record, System

MIB = 1 << 20
CPU = torch.device("cpu")


class DataRank:
    """Trains the scenario's global batch with data parallelism alone; all ranks make the same calls.

    A rank computes all layers of its share of the micro-batches, and communicates in the last one only. A system's
    number is how many buckets, or groups of fully_shard, the layers of the model are in.
    """

    loss: Tensor
    """Of the last step: mean over this rank's micro-batches, scalar."""

    def __init__(self, scenario: Scenario, system: System) -> None:
        self._way = system.family.schedule
        self._groups: list[Any] = []
        self.model = self._distribute(VirtualModel(scenario), scenario, system.segments)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        of_replica = make_batch(scenario, CPU).chunk(scenario.pp)  # its ranks are as many as stages elsewhere
        self._micro_batches = of_replica[dist.get_rank() % scenario.pp].chunk(scenario.micro_batches // scenario.pp)

    def _distribute(self, model: VirtualModel, scenario: Scenario, parts: int) -> nn.Module:
        if self._way == "ddp":
            every = list(range(scenario.ranks))
            size = sum(parameter.nbytes for parameter in model.parameters())
            return DistributedDataParallel(
                model,
                process_group=self._group([every]),
                bucket_cap_mb=size / parts / MIB,
                gradient_as_bucket_view=True,
            )
        mesh = self._mesh(scenario)
        together = len(model.layers) // parts
        groups = [
            nn.Sequential(*model.layers[first : first + together]) for first in range(0, parts * together, together)
        ]
        model.layers = nn.ModuleList(groups)
        self._groups_of_layers = [
            fully_shard(group, mesh=mesh, reshard_after_forward=self._way == "zero3") for group in groups
        ]
        fully_shard(model, mesh=mesh, reshard_after_forward=self._way == "zero3")
        return model

    def _mesh(self, scenario: Scenario) -> DeviceMesh:
        """Returns all ranks for fully_shard, or (hosts, ranks of a host): replicated over the first."""
        count, shards = scenario.ranks, scenario.shards
        every = list(range(count))
        if not self._way.startswith("hsdp"):
            return DeviceMesh.from_group(self._group([every]), "cpu", mesh=every, mesh_dim_names=("shard",))
        hosts = [every[first : first + shards] for first in range(0, count, shards)]
        groups = [self._group([list(across) for across in zip(*hosts, strict=True)]), self._group(hosts)]
        return DeviceMesh.from_group(groups, "cpu", mesh=hosts, mesh_dim_names=("replicate", "shard"))

    def _group(self, lists: list[list[int]]) -> Any:
        """Makes a group of each of `lists`; returns the calling rank's."""
        mine = next(number for number, ranks in enumerate(lists) if dist.get_rank() in ranks)
        self._groups.append(own_group(lists, mine, CPU))
        return self._groups[-1]

    def step(self) -> None:
        """Accumulates the micro-batches, reduces with the last one, updates. It takes no gradient norm."""
        losses = []
        for number, x in enumerate(self._micro_batches):
            with self._communicates(first=number == 0, last=number == len(self._micro_batches) - 1):
                loss = self.model(x) / len(self._micro_batches)
                loss.backward()
            losses.append(loss.detach())
        self.loss = torch.stack(losses).sum()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=self._way != "ddp")  # DDP's are views of buckets, and stay it

    def _communicates(self, *, first: bool, last: bool) -> Any:
        """Returns the context of a micro-batch's passes, and tells fully_shard what it is to do in them."""
        if isinstance(self.model, DistributedDataParallel):
            return nullcontext() if last else self.model.no_sync()
        assert isinstance(self.model, FSDPModule)
        # A reduce-scatter in each micro-batch would save memory only, an all-reduce in each nothing.
        self.model.set_requires_gradient_sync(last or self._way == "hsdp-scatter")
        self.model.set_requires_all_reduce(last)
        if self._way != "zero3":
            self.model.set_reshard_after_backward(last)  # weights stay until the optimizer has new ones
            for group in self._groups_of_layers if first else ():
                group.unshard(async_op=True)  # all gathers at once; each group waits for its own
        return nullcontext()

    def warmed_up(self) -> None:
        """Nothing to do: there are no records."""

    def records(self) -> Sequence[Sequence[Record]]:
        """Returns nothing: torch keeps no records."""
        return []

    def breakdown(self) -> dict[str, float]:
        """Returns nothing."""
        return {}

    def timeline(self) -> Sequence[Sequence[Any]]:
        """Returns nothing."""
        return []

    def choice(self) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def close(self) -> None:
        """Destroys the groups once no rank needs them any more."""
        dist.barrier()
        for group in self._groups:
            if group is not None:
                dist.destroy_process_group(group)
