"""What ranks run that get in the way of DP.sync: gradients and weights at the wrong time, memory that is short."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

import fold3d
from fold3d.data_parallel.dp_sync import DpSync
from tests.dist import dp_sync_waits as waits
from tests.dist.dp_sync_loops import sgd


class Branching(waits.Net):
    """Reads its head's weight without running the head, when the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(waits.WIDTH, waits.WIDTH)

    def forward(self, x: Tensor, y: Tensor, more: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.head(x) if more is None else linear(x, self.head.weight)
        return (x - y).square().mean()


def backward_of_one_s_own(dp_sync: str) -> str:
    """Returns what becomes of a gradient that comes when the step's sums have begun."""
    engine = waits.engine_of(dp=2, dp_sync=dp_sync)
    waits.step_of(engine, 0)
    waits.run_of(engine, 1)
    text = waits.error_of(lambda: engine.model(**waits.batch_of(1, 0)).backward())
    engine.close()
    return text


def unrecorded_read(dp_sync: str) -> dict[str, torch.Tensor]:
    """Returns the weights after two steps that read a weight which nobody knew they read."""
    config = fold3d.ParallelConfig(dp=2, segments=1, micro_batches=1, blocks="layers", bucket_bytes=1, dp_sync=dp_sync)
    engine = fold3d.Engine(Branching().double(), config, optimizer=sgd, example=waits.batch_of(0, 0))
    batch = waits.batch_of(0, engine.topology.dp_rank)
    known = {**batch, "more": torch.ones(len(batch["x"]), dtype=torch.float64)}

    for _ in range(2):
        engine.run([known], lambda model, part: model(**part))
        assert engine.optimizer is not None
        engine.optimizer.step()
    engine.flush()
    found = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    engine.close()
    return found


def unlike(what: str) -> str:
    """Returns what becomes of a training in which rank 1 alone does something else."""
    odd = dist.get_rank() == 1
    model = waits.Net().double()
    if what == "frozen" and odd:
        model.get_parameter("layers.1.linear.bias").requires_grad_(False)
    optimizer = functools.partial(torch.optim.SGD, lr=0.2 if what == "lr" and odd else 0.1)
    config = fold3d.ParallelConfig(dp=2, segments=1, micro_batches=waits.MICRO_BATCHES, blocks="layers")

    def steps() -> None:
        engine = fold3d.Engine(model, config, optimizer=optimizer, example=waits.batch_of(0, 0))
        try:
            engine.step(waits.batch_of(0, engine.topology.dp_rank))
            if what == "frozen later" and odd:
                model.get_parameter("layers.1.linear.bias").requires_grad_(False)
            engine.step(waits.batch_of(1, engine.topology.dp_rank))
        finally:
            engine.close()

    return waits.error_of(steps)


def run_again(**settings: Any) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Returns what becomes of a second run before the optimizer's step, the weights after the first was dropped and
    another step taken, and those of that step alone."""

    def weights(drops: bool) -> dict[str, Tensor]:
        nonlocal text
        engine = waits.engine_of(**settings)
        if drops:
            waits.run_of(engine, 1)
            assert engine.optimizer is not None
            text = waits.error_of(lambda: waits.run_of(engine, 2))
            engine.optimizer.zero_grad()
        waits.run_of(engine, 0)
        assert engine.optimizer is not None
        engine.optimizer.step()
        engine.flush()
        found = {name: parameter.detach().clone() for name, parameter in engine.owned.items()}
        engine.close()
        return found

    text = ""
    dropped = weights(drops=True)
    return text, dropped, weights(drops=False)


def drop(way: str, **settings: Any) -> str:
    """Returns what becomes of a second run after a first one's gradients were dropped, which the optimizer's are."""
    config = fold3d.ParallelConfig(segments=1, micro_batches=waits.MICRO_BATCHES, blocks="layers", **settings)
    engine = fold3d.Engine(waits.Net().double(), config, example=waits.batch_of(0, 0))
    optimizer = sgd([parameter for name, parameter in engine.owned.items() if name.endswith("weight")])
    others = sgd([parameter for name, parameter in engine.owned.items() if not name.endswith("weight")])
    engine.attach(optimizer)
    waits.run_of(engine, 0)
    if way == "zeroed":
        optimizer.zero_grad(set_to_none=False)
    else:
        if way == "another steps":  # as generator and discriminator in turns
            others.step()
        optimizer.zero_grad()
    text = waits.error_of(lambda: waits.run_of(engine, 1))
    engine.close()
    return text


def other_memory() -> str:
    """Returns what becomes of a step after a parameter was given other memory."""
    engine = waits.engine_of(dp=2, dp_sync="zero1")
    waits.step_of(engine, 0)
    engine.flush()
    for parameter in engine.owned.values():
        parameter.data = parameter.data.clone()
    text = waits.error_of(lambda: waits.step_of(engine, 1))
    engine.close()
    return text


def sum_under_the_backward() -> int:
    """Returns how often the first layer's backward waited for the last layer's sum; an error where it never comes."""
    engine = waits.engine_of(dp=2, dp_sync="early", comm_timeout=10)
    waits.step_of(engine, 0)
    engine.flush()
    assert engine._rank is not None and isinstance(engine._rank.sync, DpSync)
    sync = engine._rank.sync
    (last,) = (b.number for b in sync.buckets if any(f"layers.{waits.LAYERS - 1}." in name for name in b.names))
    passes = waited = 0

    def wait(*_: object) -> None:
        nonlocal passes, waited
        passes += 1
        if passes == waits.MICRO_BATCHES:
            sync._transfers._sync.wait_reduced(last)  # all that is missing is the first layer, which comes after this
            waited += 1

    engine.model.get_submodule("layers.0").register_full_backward_pre_hook(wait)
    waits.step_of(engine, 1)
    engine.close()
    return waited


def within(limit: int | None, **settings: Any) -> tuple[int, set[str], dict[str, Tensor]]:
    """Trains with so much memory a rank; returns what was planned to need, the ways of DP.sync, own weights."""
    engine = _limited(limit, functools.partial(torch.optim.Adam, lr=0.05), bucket_bytes=1, **settings)
    for number in range(3):
        engine.step(_single(number, engine.topology.dp_rank))
    engine.flush()
    weights = {name: parameter.detach().clone() for name, parameter in engine.owned.items()}
    assert engine._rank is not None and isinstance(engine._rank.sync, DpSync)
    told: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(told, set(engine._rank.sync.plan.modes))
    needs = engine.planned_memory or 0
    engine.close()
    return needs, set().union(*told), weights


def _limited(limit: int | None, optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> fold3d.Engine:
    config = fold3d.ParallelConfig(dp=2, micro_batches=2, blocks="layers", memory_limit=limit, **settings)
    return fold3d.Engine(waits.Net(), config, optimizer=optimizer, example=_single(0, 0))


def _single(step: int, replica: int) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in waits.batch_of(step, replica).items()}


def too_little(optimizer: str) -> str:
    """Returns what becomes of an engine for which no memory suffices, or not with this optimizer."""
    kind = getattr(torch.optim, optimizer)
    layout = {"pp": 2, "segments": 2, "schedule": "aiao", "recompute": "none", "offload": "none"}
    engine = _limited(1 << 30, kind, **layout)
    assert engine.planned_memory is not None
    limit = 1000 if optimizer == "Adam" else engine.planned_memory - 1
    engine.close()
    return waits.error_of(lambda: _limited(limit, kind, **layout))


def without_blocks() -> str:
    """Returns what becomes of a memory limit for a model whose layers nobody can name."""
    config = fold3d.ParallelConfig(dp=2, micro_batches=2, memory_limit=1 << 20)
    model = nn.Linear(waits.WIDTH, 1)
    model.forward = lambda x, y: nn.functional.linear(x, model.weight).mean()  # type: ignore[method-assign]
    return waits.error_of(lambda: fold3d.Engine(model, config, optimizer=sgd, example=_single(0, 0)))
