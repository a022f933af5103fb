"""Layouts of several ranks on the simulated device, beside the same ranks on the CPU."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import fold3d
from fold3d.data_parallel.optimizer import bucket_optimizer
from fold3d.device import default_device
from fold3d.engine.loss import loss_of
from fold3d.errors import RankError
from simdevice import sim
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import TOLERANCE, assert_equal, assert_same_bits


def on_the_device() -> None:
    """What this process runs from now on computes on the simulated device, if nobody says where."""
    assert default_device().type == "sim"


def as_on_the_cpu(case: Case, microseconds: int = 0) -> int:
    """Trains the case on both, and asserts that the numbers are the same bits; of more replicas or stages than two,
    whose sums have the library's order, that they are near. Returns how many kernels that took.

    Beside a device torch's fused AdamW steps on the host, which rounds otherwise than the one that steps there on the
    CPU: with it the numbers are near, without it the same.

    Races raise. Attention by its parts, for which the CPU otherwise has a kernel of its own.

    Args:
        microseconds: of delay for each kernel, at random.
    """
    return _as(case, _on_the_cpu(case), microseconds)


def _on_the_cpu(case: Case) -> parity_jobs.Result:
    with sdpa_kernel(SDPBackend.MATH):
        return parity_jobs.train(case, device=torch.device("cpu"))


def _as(case: Case, want: parity_jobs.Result, microseconds: int = 0) -> int:
    before = sim.launches()
    sim.take_reports()
    with sdpa_kernel(SDPBackend.MATH), sim.jitter(microseconds):
        got = parity_jobs.train(case)
        if case.offload_optimizer:
            assert_equal(got, want, TOLERANCE[case.dtype])
            with mock.patch.object(bucket_optimizer, "has_fused_step", return_value=False):
                got = parity_jobs.train(case)
    assert not sim.take_reports()
    if case.dp > 2 or case.pp > 2:
        assert_equal(got, want, TOLERANCE[case.dtype])
    else:
        assert_same_bits(got, want)
    return sim.launches() - before


def waits_of_a_step(case: Case, *, scales: bool = False) -> dict[str, int]:
    """Returns how often the training thread waits for the device in each part of a step. Its model reads nothing
    itself, as those of transformers do to make a mask.

    Args:
        scales: a loss scaler decides on the device which steps count.
    """
    case = replace(case, family="plain")
    counts: dict[str, int] = {}

    @contextlib.contextmanager
    def counted(part: str) -> Iterator[None]:
        before = sim.host_waits()
        yield
        counts[part] = sim.host_waits() - before

    with parity_jobs.precision(case), sdpa_kernel(SDPBackend.MATH):
        model = parity_jobs.build(case)
        scaler = torch.amp.GradScaler("sim", init_scale=2.0**8) if scales else None
        engine = fold3d.Engine(
            model, parity_jobs.config_of(case), optimizer=parity_jobs.optimizer_of(model), scaler=scaler
        )
        for step in range(4):
            rows = parity_jobs.micro_batches_of(case, parity_jobs.global_batch(case, step), engine.topology.dp_rank)
            parts = [parity_jobs.on(engine.device, part) for part in rows]
            with counted("run"):
                engine.run(parts, lambda model, batch: loss_of(model(**batch)) / case.m)
            with counted("clip"):
                norm = engine.clip_grad_norm(parity_jobs.MAX_NORM)
            optimizer = engine.optimizer
            assert optimizer is not None and norm.device == engine.device
            with counted("step"):
                optimizer.step() if scaler is None else scaler.step(optimizer)
                optimizer.zero_grad()
            if scaler is not None:
                with counted("update"):
                    scaler.update()
            with counted("flush"):
                engine.flush()
        assert norm.item() > parity_jobs.MAX_NORM
        assert scaler is None or scaler.get_scale() == 2.0**8
        engine.close()
    return counts


def as_on_the_cpu_when_bound(case: Case) -> int:
    """The same where groups are bound to the device, as after `init_process_group(device_id=...)`: each of them has one
    communicator for all."""
    want = _on_the_cpu(case)
    bound = functools.partial(dist.new_group, device_id=torch.device("sim", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", bound)
        return _as(case, want)


SLOW_NETWORK = 1e6
"""Bytes per second: sums and weights are under way for so long that the host launches what uses them meanwhile. What it
launches after a thread of its own has seen the end comes after it, and nothing is forgotten."""


def forgotten(case: Case, ordering: str, thread: str) -> list[str]:
    """Trains a case in which `thread` forgets an ordering; returns the races that were found."""
    slow = sim.network(SLOW_NETWORK if case.dp > 1 else 0)
    with parity_jobs.precision(case), sdpa_kernel(SDPBackend.MATH), slow, sim.recorded() as reports:
        engine = parity_jobs.engine_of(case)
        with sim.left_out(ordering, thread):
            for step in range(8):
                engine.step(parity_jobs.batch_of(engine, case, step))
            engine.flush()
        torch.accelerator.synchronize()
        engine.close()
    return reports


def ragged(case: Case) -> tuple[int, int]:
    """Trains with micro-batches that have one length for some steps and another for one, beside the CPU; returns how
    many steps that were."""
    lengths = (9, 9, 9, 9, 6, 9, 9, 7)
    runs = []
    for device in ("cpu", "sim"):
        with parity_jobs.precision(case), sdpa_kernel(SDPBackend.MATH):
            engine = parity_jobs.engine_of(case, device=torch.device(device))
            losses = []
            for step, length in enumerate(lengths):
                batch = {name: tensor[:, :length] for name, tensor in parity_jobs.batch_of(engine, case, step).items()}
                losses.append(float(engine.step(batch).loss))
                if step % 3 == 2:
                    losses.append(float(engine.evaluate(batch)))
            weights = {name: value.cpu() for name, value in engine.state_dict()["model"].items()}
            engine.close()
        runs.append((losses, weights))
    (want, want_weights), (got, weights) = runs
    assert got == want
    for name, weight in want_weights.items():
        assert torch.equal(weights[name], weight), name
    return len(got), len(lengths)


def synchronizing(case: Case) -> int:
    """The forward of every block waits for all that its device was told, as where memory is freed or a kernel is
    loaded; the same as on the CPU. Returns how often that was."""
    want = _on_the_cpu(case)
    calls = 0

    def wait(module: torch.nn.Module, args: object) -> None:
        nonlocal calls
        calls += 1
        torch.accelerator.synchronize()

    hook = torch.nn.modules.module.register_module_forward_pre_hook(wait)
    try:
        _as(case, want)
    finally:
        hook.remove()
    return calls


def failing(case: Case, bad_rank: int) -> tuple[float, str]:
    """A rank raises in the forward of its third step; returns seconds until this rank knew, and what it was told."""
    engine = parity_jobs.engine_of(case)
    for step in range(2):
        engine.step(parity_jobs.batch_of(engine, case, step))
    batch = parity_jobs.batch_of(engine, case, 2)
    begin = time.monotonic()
    handle = None
    if engine.topology.rank == bad_rank:

        def raises(*_: object) -> None:
            raise ValueError("on purpose")

        module = next(m for n, m in engine.model.named_modules() if n and n in next(iter(engine.owned)))
        handle = module.register_forward_pre_hook(raises)
    with pytest.raises(RankError) as error:
        engine.step(batch)
    seconds = time.monotonic() - begin
    if handle is not None:
        handle.remove()
    engine.close()
    for _ in range(8):  # kernels that failed before they were aborted
        with contextlib.suppress(RuntimeError):
            torch.accelerator.synchronize()
    return seconds, str(error.value)
