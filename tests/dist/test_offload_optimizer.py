"""An optimizer in host memory gives what it gives on the device, to the bit: weights, state, files; and the device has
its bytes no more."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fold3d
from fold3d import _C
from fold3d.data_parallel.optimizer import bucket_optimizer
from tests.dist import parity_cases, parity_jobs
from tests.dist.parity_cases import STEPS, Case
from tests.helpers import device
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

CASES = [
    Case(m=3, dtype="float32", dropout=0.1, labels="padded"),
    Case(m=2, dtype="bfloat16", family="llama", segments=2, schedule="aiao"),
    Case(dp=2, pp=2, m=3, segments=2, schedule="aiao", dtype="bfloat16", dp_sync="zero1", tied=False),
    Case(dp=2, m=2, dtype="float32", dp_sync="early", frozen=True),
    Case(dp=2, tp=2, m=2, dtype="float32", dp_sync="zero1", tp_overlap="none"),
    Case(pp=2, tp=2, m=2, dtype="bfloat16", family="llama", tp_overlap="none"),
    Case(dp=2, pp=2, m=2, dtype="float32", dp_sync="serial", recompute="blocks"),
    Case(dp=2, m=2, dtype="float32", dp_sync="zero1", through="trainer"),
    Case(m=2, dtype="float32", through="trainer"),
]
RESUMED = [
    Case(dp=2, m=2, dtype="float32", dp_sync="zero1"),
    Case(pp=2, tp=2, m=2, dtype="float32", tp_overlap="none"),
    Case(dp=2, m=1, dtype="bfloat16", dp_sync="early"),
]


def same(one: Any, other: Any) -> bool:
    """Whether two nestings of tensors and values are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_to_the_bit(ranks: RankPool, case: Case) -> None:
    off = ranks.run(train, case.ranks, case)
    on = ranks.run(train, case.ranks, replace(case, offload_optimizer=True))
    for mine, wanted in zip(on, off, strict=True):
        assert mine.losses == wanted.losses and mine.norms == wanted.norms and len(mine.losses) == STEPS
        assert mine.digests == wanted.digests
        assert same(mine.weights, wanted.weights) and same(mine.state, wanted.state)


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_a_state_goes_on_either_way(ranks: RankPool, case: Case) -> None:
    on = replace(case, offload_optimizer=True)
    begun = ranks.run(train, case.ranks, on, start=None, steps=[0, 1])[0].state
    ends = [ranks.run(train, case.ranks, one, start=begun, steps=[2])[0] for one in (case, on)]
    whole = ranks.run(train, case.ranks, case)[0]
    assert all(same(end.state, whole.state) and end.losses == whole.losses[2:] for end in ends)


def train(case: Case, **options: Any) -> parity_jobs.Result:
    """As `parity_jobs.train`."""
    with as_on_the_device():
        return parity_jobs.train(case, **options)


def as_on_the_device() -> contextlib.AbstractContextManager[object]:
    """Beside an accelerator torch's fused AdamW steps on the host, which rounds otherwise than the one there: without
    it the bits are the same."""
    if device.chosen() == "cpu":
        return contextlib.nullcontext()
    return mock.patch.object(bucket_optimizer, "has_fused_step", return_value=False)


@pytest.mark.parametrize("case", [Case(dp=2, dtype="float32", dp_sync="zero1"), Case(pp=2, m=2, dtype="bfloat16")])
def test_checkpoints_of_the_trainer(ranks: RankPool, case: Case, tmp_path: Path) -> None:
    """Files are the same, and a run goes on from either with or without."""
    on = replace(case, offload_optimizer=True)
    off_folder, on_folder = tmp_path / "off", tmp_path / "on"
    whole = ranks.run(saved, case.ranks, case, str(off_folder), None)[0]
    assert same(ranks.run(saved, case.ranks, on, str(on_folder), None)[0], whole)
    files = [torch.load(folder / "checkpoint-2" / "optimizer.pt") for folder in (off_folder, on_folder)]
    assert same(*files) and files[0]["state"]
    for how, folder in ((on, off_folder), (case, on_folder), (on, on_folder)):
        resumed = ranks.run(saved, case.ranks, how, str(tmp_path / "again"), str(folder / "checkpoint-2"))[0]
        assert same(resumed, whole)


def saved(case: Case, folder: str, resume: str | None) -> dict[str, torch.Tensor]:
    """Returns the weights of a run that saves each step in a folder, or goes on from one."""
    with parity_jobs.precision(case), device.watched(), as_on_the_device():
        named = parity_jobs.trainer_arguments(case, folder) | {"gradient_accumulation_steps": case.m}
        named |= {"save_strategy": "steps", "save_steps": 1, "comm_timeout": 100.0}
        named |= {"use_cpu": device.chosen() == "cpu"}
        layout: dict[str, Any] = {"dp": case.dp, "pp": case.pp, "offload_optimizer": case.offload_optimizer}
        layout |= {"dp_sync": case.dp_sync, "bucket_bytes": parity_cases.BUCKET_BYTES} if case.dp > 1 else {}
        trainer = fold3d.Trainer(
            model=parity_jobs.build(case),
            args=fold3d.TrainingArguments(**(named | layout)),
            train_dataset=parity_jobs.dataset(case),
            data_collator=parity_jobs.collate,
        )
        trainer.train(resume_from_checkpoint=resume)
        weights: dict[str, torch.Tensor] = trainer.engine.state_dict()["model"]
        trainer.engine.close()
    return weights


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp_sync", ["zero1", "early", None])
def test_its_bytes_leave_the_device(ranks: RankPool, dp_sync: str | None) -> None:
    if device.chosen() != "cpu":
        pytest.skip("the account is that of the CPU's memory")
    dp = 1 if dp_sync is None else 2
    case = Case(dp=dp, dtype="float32", dp_sync=dp_sync or "auto", layers=2, family="gpt2-96", clip=False)
    off, on = (ranks.run(bytes_of, dp, replace(case, offload_optimizer=how))[0] for how in (False, True))
    state, peak, host = off
    assert state > 0 and host == 0
    assert on[1] <= peak - 0.98 * state, "the peak of a step falls by the state"
    assert on[0] == 0 and on[2] >= state


def bytes_of(case: Case) -> tuple[int, int, int]:
    """Returns the bytes of optimizer state on the device, the most that tensors held in a step, and the bytes in host
    memory; all by the account of torch's allocator for the CPU."""
    with parity_jobs.precision(case):
        assert _C.count_cpu_bytes(True)
        try:
            before = _C.live_cpu_bytes()
            engine = parity_jobs.engine_of(case)
            batches = [parity_jobs.batch_of(engine, case, step) for step in range(3)]
            engine.step(batches[0])
            engine.step(batches[1])
            _C.reset_peak_cpu_bytes()
            engine.step(batches[2])
            engine.flush()
            peak, host = _C.peak_cpu_bytes() - before, _C.host_cpu_bytes()
            assert engine.optimizer is not None
            optimizer = getattr(engine._built().sync, "optimizer", None)
            states = [
                dict(dict.items(engine.optimizer.state)),
                *(part.twin.state for part in getattr(optimizer, "parts", [])),
            ]
            tensors = {id(t): t for state in states for values in state.values() for t in values.values() if t.ndim}
            engine.close()
            return sum(t.nbytes for t in tensors.values() if _C.is_counted(t)), peak, host
        finally:
            _C.count_cpu_bytes(False)


class Averaged(torch.optim.SGD):
    """Keeps other weights for evaluation."""

    def eval(self) -> None:
        """Puts them in place."""


class OneDevice(torch.optim.SGD):
    """Has kernels for one device only."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("no kernel for cpu")


def engine(optimizer: Any) -> fold3d.Engine:
    """Returns an engine of a small model."""
    config = fold3d.ParallelConfig(offload_optimizer=True)
    return fold3d.Engine(torch.nn.Linear(4, 4), config, optimizer=optimizer)


def test_what_cannot_be_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fold3d.ConfigError, match=r"offload_optimizer='yes': must be True or False"):
        fold3d.ParallelConfig(offload_optimizer="yes")  # type: ignore[arg-type]
    with pytest.raises(fold3d.ConfigError, match="LBFGS cannot do"):
        engine(torch.optim.LBFGS)
    with pytest.raises(fold3d.ConfigError, match=r"OneDevice cannot do \(RuntimeError: no kernel for cpu\)"):
        engine(functools.partial(OneDevice, lr=0.1))
    with pytest.raises(fold3d.ConfigError, match="Averaged computes the weights for evaluation from it"):
        engine(functools.partial(Averaged, lr=0.1))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(_C, "available_host_bytes", lambda: 600)
    with pytest.raises(fold3d.ConfigError, match=r"each of the 4 processes .* needs about 1.. B of host memory"):
        engine(functools.partial(torch.optim.AdamW, lr=0.1))


def test_a_host_that_is_too_small_is_an_error_on_every_rank(ranks: RankPool) -> None:
    texts = ranks.run(without_memory, 2)
    assert all("host memory for the optimizer's state" in text for text in texts)


def without_memory() -> str:
    """Returns what building the engine says where rank 1's host has nothing left."""
    available = _C.available_host_bytes
    case = Case(dp=2, dtype="float32", dp_sync="zero1", offload_optimizer=True)
    if torch.distributed.get_rank() == 1:
        _C.available_host_bytes = lambda: 1
    try:
        parity_jobs.engine_of(case, example=parity_jobs.replica_batch(case, 0, 0))
    except fold3d.Fold3dError as error:
        return str(error)
    finally:
        _C.available_host_bytes = available
    return "nothing"
