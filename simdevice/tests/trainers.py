"""fold3d.Trainer on the simulated device, beside the same Trainer on the CPU."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fold3d
from fold3d.engine.planning import memory_limit
from simdevice import sim
from tests.dist import parity_cases, parity_jobs
from tests.dist.parity_cases import Case


@dataclass(kw_only=True)
class Run:
    """What a training logged, by step, and left."""

    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    cut: Any = None
    """Blocks of each chunk: the gradient norm is summed by stages, so its last bits depend on them."""

    def assert_is(self, other: Run, *, after: int = 0) -> None:
        """The same bits as `other`, from the step behind `after` on."""
        assert self.cut == other.cut
        assert self.weights.keys() == other.weights.keys()
        for mine, theirs in ((self.losses, other.losses), (self.evaluations, other.evaluations)):
            wanted = {step: value for step, value in theirs.items() if step > after}
            assert mine == wanted and len(mine) == 3 - after, f"{mine}, wanted {wanted}"
        pairs = {name: (self.weights[name], tensor) for name, tensor in other.weights.items()}
        different = {name: float((a - b).abs().max()) for name, (a, b) in pairs.items() if not torch.equal(a, b)}
        assert not different, f"weights differ by {different}"


def resumed(case: Case) -> int:
    """Trains on both, evaluates after each step; on the device also saves at the second step and goes on from there in
    another Trainer. Asserts that all have the same bits, and that there is no race; returns how many kernels that took.

    Attention by its parts, for which the CPU otherwise has a kernel of its own.
    """
    before = sim.launches()
    sim.take_reports()
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else contextlib.nullcontext("") as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        folder = folders[0]
        with sdpa_kernel(SDPBackend.MATH), parity_jobs.precision(case):
            want = _trained(case, folder, use_cpu=True, max_steps=3)
            whole = _trained(case, folder, max_steps=3)
            _trained(case, folder, max_steps=2, save_strategy="steps", save_steps=2)
            rest = _trained(case, folder, resume=f"{folder}/checkpoint-2", max_steps=3)
        dist.barrier()
    assert not sim.take_reports()
    whole.assert_is(want)
    rest.assert_is(want, after=2)
    return sim.launches() - before


def _trained(case: Case, folder: str, *, resume: str | None = None, use_cpu: bool = False, **arguments: Any) -> Run:
    named = parity_jobs.trainer_arguments(case, folder) | {"gradient_accumulation_steps": case.m, "use_cpu": use_cpu}
    layout = {"dp": case.dp, "pp": case.pp, "segments": case.segments, "schedule": case.schedule}
    layout |= {"dp_sync": case.dp_sync, "bucket_bytes": parity_cases.BUCKET_BYTES} if case.dp > 1 else {}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "comm_timeout": 100.0}
    trainer = fold3d.Trainer(
        model=parity_jobs.build(case),
        args=fold3d.TrainingArguments(**(named | layout | evaluates | arguments)),
        train_dataset=parity_jobs.dataset(case),
        eval_dataset=parity_jobs.dataset(case, 1),
        data_collator=parity_jobs.collate,
    )
    # A device whose memory is known has the model cut by measured times: which cut that is, other processes decide.
    with mock.patch.object(memory_limit, "total_memory", return_value=None):
        trainer.train(resume_from_checkpoint=resume)
    assert trainer.engine.device.type == ("cpu" if use_cpu else "sim")
    run = Run(weights=trainer.engine.state_dict()["model"], cut=trainer.engine.strategy.ranges)
    for entry in trainer.state.log_history:
        for name, kept in (("loss", run.losses), ("eval_loss", run.evaluations)):
            if name in entry and entry["step"] > (2 if resume else 0):
                kept[entry["step"]] = entry[name]
    trainer.engine.close()
    return run
