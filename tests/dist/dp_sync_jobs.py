"""What the ranks run to show that DP.sync is exact, lazy and whole where it is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fold3d
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.device import default_device
from fold3d.errors import ConfigError
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case

STEPS = 4


@dataclass(kw_only=True)
class Steps:
    """What a rank saw."""

    scales: list[float]
    norms: list[float]
    weights: list[dict[str, Tensor]]
    """After every step."""


def weights_of(engine: fold3d.Engine) -> dict[str, Tensor]:
    """Returns a copy of this rank's parameters, on the CPU, once they are up to date."""
    engine.flush()
    return {name: parameter.detach().clone().cpu() for name, parameter in engine.owned.items()}


def train_with_infinity(case: Case, bad_rank: int, bad_chunk: int, bad_step: int) -> Steps:
    """Trains with a loss scaler; in one step one rank's gradient of one chunk is infinite."""
    model = parity_jobs.build(case)
    scaler = torch.amp.GradScaler(default_device().type, init_scale=2.0**8, growth_interval=1000)
    config = parity_jobs.config_of(case)
    engine = fold3d.Engine(
        model, config, optimizer=parity_jobs.optimizer_of(model), max_grad_norm=parity_jobs.MAX_NORM, scaler=scaler
    )
    seen = Steps(scales=[], norms=[], weights=[weights_of(engine)])
    for step in range(STEPS):
        batch = parity_jobs.batch_of(engine, case, step)
        poison = step == bad_step and engine.topology.rank == bad_rank
        with _infinite(engine, bad_chunk) if poison else _nothing():
            out = engine.step(batch)
        seen.scales.append(scaler.get_scale())
        seen.norms.append(out.grad_norm.item())
        seen.weights.append(weights_of(engine))
    engine.close()
    return seen


@contextmanager
def _infinite(engine: fold3d.Engine, chunk: int) -> Iterator[None]:
    """One element of one gradient of the chunk becomes infinite when its last micro-batch's backward produces it."""
    trace = engine.trace
    assert trace is not None
    block = trace.blocks[engine.strategy.ranges[chunk][0]]
    parameter = next(p for n, p in engine.owned.items() if n.startswith(block + "."))
    first = torch.tensor([0], device=engine.device)
    hook = parameter.register_hook(lambda gradient: gradient.index_fill(0, first, float("inf")))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def optimizer_bytes(case: Case) -> tuple[int, int]:
    """Returns the bytes of optimizer state that this rank keeps, and those of its parameters."""
    engine = parity_jobs.engine_of(case)
    engine.step(parity_jobs.batch_of(engine, case, 0))
    engine.flush()
    assert engine.optimizer is not None and engine._rank is not None and isinstance(engine._rank.sync, DpSync)
    states = [
        dict(dict.items(engine.optimizer.state)),
        *(part.twin.state for part in engine._rank.sync.optimizer.parts),
    ]
    unique = {id(t): t for state in states for values in state.values() for t in values.values() if t.ndim}
    own = sum(parameter.numel() for parameter in engine.owned.values() if parameter.requires_grad)
    engine.close()
    return sum(tensor.nbytes for tensor in unique.values()), own * 8


def read_lazily(case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns a stage's weights as `model.state_dict()`, `flush` and the next forward leave them after a step."""
    found = []
    for way in ("state_dict", "flush", "forward"):
        engine = parity_jobs.engine_of(case)
        batch = parity_jobs.batch_of(engine, case, 0)
        engine.step(batch)
        if way == "state_dict":
            whole = engine.model.state_dict()
            found.append({name: whole[name].clone().cpu() for name in engine.owned})
        elif way == "forward":
            engine.evaluate(batch)
            found.append({name: p.detach().clone().cpu() for name, p in engine.owned.items()})
        else:
            found.append(weights_of(engine))
        engine.close()
    return found[0], found[1], found[2]


def close_at_once(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns a rank's weights after steps, when it is flushed and when it is closed right after the last of them."""
    found = []
    for flushed in (True, False):
        engine = parity_jobs.engine_of(case)
        for step in range(2):
            engine.step(parity_jobs.batch_of(engine, case, step))
        owned = engine.owned
        if flushed:
            engine.flush()
        engine.close()
        found.append({name: parameter.detach().clone().cpu() for name, parameter in owned.items()})
    return found[0], found[1]


def overlap(case: Case, *, holds: bool) -> tuple[int, int]:
    """Returns how many sums of the last step began before the rank's last backward ended, and how many there were.

    Args:
        holds: whether the last backward waits for the sums of the rank's last chunk: where these do not go on
            meanwhile, the job ends with a timeout.
    """
    engine = parity_jobs.engine_of(case)
    engine.step(parity_jobs.batch_of(engine, case, 0))
    with _held(engine, case.m) if holds else _nothing():
        engine.step(parity_jobs.batch_of(engine, case, 1))
    records = engine.breakdown().records
    engine.close()
    end = max(end for lane, action, _, end, _ in records if lane == "compute" and "B" in action)
    sums = [start for lane, _, start, _, _ in records if lane == "reduce"]
    return sum(start < end for start in sums), len(sums)


@contextmanager
def _held(engine: fold3d.Engine, micro_batches: int) -> Iterator[None]:
    """The backward of a rank's first chunk waits, in the step's last micro-batch, for the sums of its last chunk."""
    assert engine._rank is not None and isinstance(engine._rank.sync, DpSync)
    sync = engine._rank.sync
    own = [bucket for bucket in sync.buckets if not bucket.spec.summed_over.is_shared]
    first = min(own, key=lambda bucket: bucket.spec.chunk)
    last = [bucket for bucket in own if bucket.spec.chunk > first.spec.chunk]
    assert last
    calls = itertools.count(1)

    def wait(_gradient: Tensor) -> None:
        if next(calls) % micro_batches == 0:
            for bucket in last:
                sync._transfers._sync.wait_reduced(bucket.key)

    hook = first.parameters[-1].register_hook(wait)
    try:
        yield
    finally:
        hook.remove()


class RowNorm(torch.optim.SGD):
    """Divides each gradient by its norm: not element-wise."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm())
        super().step(closure)


def refuse(case: Case) -> str:
    """Returns why an optimizer that is not element-wise is refused."""
    model = parity_jobs.build(case)
    try:
        fold3d.Engine(
            model,
            parity_jobs.config_of(case),
            optimizer=lambda params: RowNorm(params, lr=0.1),
            example=parity_jobs.global_batch(case, 0),
        )
    except ConfigError as error:
        return str(error)
    return ""
