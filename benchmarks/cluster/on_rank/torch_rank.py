"""TorchRank: torch.distributed.pipelining on one rank, with gradients summed as early as its schedules allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.cluster.on_rank.torch_timeline import TorchTimeline
from benchmarks.cluster.on_rank.virtual_layer import make_batch, make_layers
from benchmarks.cluster.scenarios import Scenario
from benchmarks.cluster.systems import LEARNING_RATE, Record, System
from fold3d.device import synchronize


class TorchRank:
    """Trains the scenario's layers with one of torch's schedules; all ranks make the same calls.

    A layer is a bucket: its all-reduce starts, asynchronously and on connections of its own, when its last micro-batch
    has added to its gradient, and is awaited after the schedule. DistributedDataParallel around stages is far slower.
    """

    def __init__(self, scenario: Scenario, system: System) -> None:
        rank, schedule, segments = dist.get_rank(), system.family.schedule, system.segments
        self._device = device = torch.device("cpu") if system.device == "cpu" else torch.device(system.device, 0)
        replica, stage = divmod(rank, scenario.pp)
        pipelines = [list(range(d * scenario.pp, (d + 1) * scenario.pp)) for d in range(scenario.dp)]
        self._pipeline = own_group(pipelines, replica, device)
        self._data = own_group([[p[s] for p in pipelines] for s in range(scenario.pp)], stage, device)
        self._micro_batches = scenario.micro_batches
        layers_per_chunk = scenario.layers // segments
        modules = [nn.Sequential(*make_layers(scenario, layers_per_chunk)).to(device) for _ in range(segments)]
        chunks = segments * scenario.pp
        self._timeline = TorchTimeline({k * scenario.pp + stage: list(module) for k, module in enumerate(modules)})
        stages = [
            PipelineStage(module, k * scenario.pp + stage, chunks, device, group=self._pipeline)
            for k, module in enumerate(modules)
        ]
        share = 1.0 / (scenario.micro_batches * scenario.dp)  # so that the sum over everything is the mean
        single = schedule == "Schedule1F1B"
        self._schedule: Any = getattr(schedules, schedule)(
            stages[0] if single else stages,
            scenario.micro_batches,
            loss_fn=lambda output, _: output.mean() * share,
            scale_grads=False,  # it would scale after the schedule, when the sums are under way
        )
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._added: dict[Tensor, int] = dict.fromkeys(self._parameters, 0)
        self._works: list[Any] = []
        if self._data is not None:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._after_accumulate)  # type: ignore[no-untyped-call]
        self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE)
        self._batch = make_batch(scenario, device)
        self._is_first, self._is_last = stage == 0, stage == scenario.pp - 1

    def _after_accumulate(self, parameter: Tensor) -> None:
        self._added[parameter] += 1
        if self._added[parameter] == self._micro_batches:
            self._added[parameter] = 0
            work = dist.all_reduce(parameter.grad, group=self._data, async_op=True)
            self._timeline.sum_begins(parameter, work)
            self._works.append(work)

    def step(self) -> None:
        """Runs the schedule, awaits the sums and updates. It takes no gradient norm."""
        self._timeline.begin()
        inputs = (self._batch,) if self._is_first else ()
        # The target is not used, but the schedule divides it into micro-batches.
        keywords = {"target": self._batch, "losses": []} if self._is_last else {}
        self._schedule.step(*inputs, **keywords)
        with self._timeline.waiting():
            for work in self._works:
                work.wait()
        self._works.clear()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        synchronize(self._device)  # a step ends when the weights are complete

    def warmed_up(self) -> None:
        """Nothing to do: there are no records."""

    def records(self) -> Sequence[Sequence[Record]]:
        """Returns nothing: torch's runtime keeps no records."""
        return []

    def breakdown(self) -> dict[str, float]:
        """Returns nothing."""
        return {}

    def timeline(self) -> Sequence[Sequence[Any]]:
        """Returns what the layers and the sums of the last step recorded."""
        return self._timeline.records()

    def choice(self) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def close(self) -> None:
        """Destroys the groups once no rank needs them any more."""
        dist.barrier()
        for group in (self._pipeline, self._data):
            if group is not None:
                dist.destroy_process_group(group)


def own_group(lists: list[list[int]], mine: int, device: torch.device) -> Any:
    """Makes one group per list, on every rank in the same order; returns number `mine`, None where it is one rank."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,sim:simccl"
    groups = [dist.new_group(ranks, backend=backend) if len(ranks) > 1 else None for ranks in lists]
    return groups[mine]
