"""parallel="auto": the mesh and the micro-batches are decided at start, and the numbers do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fold3d
from fold3d.checkpoint import manifest
from fold3d.engine.planning.mesh import Decision
from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, error_of, run_fold3d, run_stock

AUTO = {"parallel": "auto", "global_batch_size": 16}
ONE_STEP: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 16,
    "max_steps": 3,
    "optim": "sgd",  # AdamW makes much of the last bits of what is nearly 0
    "learning_rate": 1.0,
}


class Told(Variant):
    """Notes what was decided."""

    def after(self, trainer: Any) -> Any:
        topology = trainer.engine.topology
        assert (topology.dp, topology.tp, topology.pp) == (trainer.args.dp, trainer.args.tp, trainer.args.pp)
        return trainer.args.mesh.to_dict()


def job_in(folder: Path, **changes: Any) -> Job:
    arguments = ONE_STEP | {"per_device_train_batch_size": 4} | changes.pop("arguments", {})
    return Job(str(folder), samples=64, arguments=arguments, variant=Told(), **changes)


def alone(job: Job) -> Any:
    """The stock Trainer in one process, a step of which is one micro-batch."""
    return run_stock(replace(job, arguments=job.arguments | ONE_STEP, variant=Variant()))


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    ("processes", "fixed"),
    [(1, {}), (2, {}), (2, {"tp": 2}), (4, {"pp": 2, "tp": 1}), (4, {}), (4, {"dp": 1, "tp": 1})],
)
def test_losses_are_those_of_one_process(
    ranks: RankPool, tmp_path: Path, processes: int, fixed: dict[str, int]
) -> None:
    job = job_in(tmp_path)
    outcomes = ranks.run(run_fold3d, processes, job, AUTO | fixed, timeout=180)
    stock = alone(job)
    for outcome in outcomes:
        made = Decision.of(outcome.extra)
        assert made is not None and made.world == processes and made.samples <= 4
        assert made.dp * made.micro_batches * made.samples == 16
        assert fixed.items() <= outcome.extra.items()
        assert outcome.extra == outcomes[0].extra
        outcome.metrics = stock.metrics  # of evaluation batches that every replica has of its own
        # transformers computes the loss in float32, of which shards of the vocabulary sum parts
        assert_same(outcome, stock, 1e-8 if made.tp > 1 else 1e-10)


@pytest.mark.full
def test_the_decision_is_kept_with_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    """It is taken on resuming, and made anew for another number of processes; the numbers go on as if nothing were."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    job = job_in(tmp_path, arguments=saving)
    whole = ranks.run(run_fold3d, 4, job, AUTO | {"pp": 2}, timeout=180)[0]
    last = tmp_path / "checkpoint-2"
    assert manifest.said(last, "mesh") == whole.extra
    other = dict(whole.extra, micro_batches=16 // whole.extra["dp"], samples=1)  # to be told from a new one
    manifest.write(last, step_index=2, batch=16, mesh=other)
    for processes, expected in ((4, other), (2, None)):
        arguments = saving | {"resume_from_checkpoint": str(last)}
        again = replace(job, resume=str(last), arguments=job.arguments | arguments)
        resumed = ranks.run(run_fold3d, processes, again, AUTO, timeout=180)[0]
        assert resumed.extra == expected or (expected is None and Decision.of(resumed.extra).world == 2)  # type: ignore[union-attr]
        for name, value in whole.weights.items():
            assert (value - resumed.weights[name]).abs().max() <= 1e-10


@pytest.mark.full
def test_what_cannot_be_is_said_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    for layout, message in (
        (AUTO | {"global_batch_size": 3, "dp": 2}, "global_batch_size=3 and 2 processes can be divided by no dp"),
        (AUTO | {"tp": 2, "tp_plan": {"transformer.h.0": "nonsense"}}, "no mesh is possible"),
        (AUTO | {"memory_limit": 1000}, "no mesh fits, the least that a process would need"),
    ):
        for told in ranks.run(error_of, 2, job, layout, ConfigError, timeout=120):
            assert message in told


def test_arguments() -> None:
    def arguments(**named: Any) -> fold3d.TrainingArguments:
        return fold3d.TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **named)

    assert (arguments().tp, arguments().pp) == (1, 1)
    open_ = arguments(**AUTO)
    assert (open_.dp, open_.tp, open_.pp, open_.mesh) == (None, None, None, None) and open_.layout.is_open
    made = Decision(dp=1, tp=1, pp=1, micro_batches=4, samples=4, parameters=7)
    open_.settle(made)
    assert open_.mesh == made and (open_.gradient_accumulation_steps, open_.per_device_train_batch_size) == (4, 4)
    assert not open_.layout.is_open and open_.layout.micro_batches == 4
    again = fold3d.TrainingArguments(**open_.to_dict())
    assert not again.layout.is_open and again.layout == open_.layout
    followed = arguments(global_batch_size=16, per_device_train_batch_size=2)
    assert followed.gradient_accumulation_steps == 8 and followed.layout.micro_batches == 8
    for named, message in (
        ({"parallel": "best"}, "parallel='best': must be \"auto\""),
        ({"parallel": "auto"}, "set global_batch_size"),
        ({"parallel": "auto", "global_batch_size": 0}, "global_batch_size=0: must be an integer of at least 1"),
        (AUTO | {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 is not available"),
        (AUTO | {"micro_batch_size": 2}, "micro_batch_size=2 has no effect"),
        (AUTO | {"auto_find_batch_size": True}, "auto_find_batch_size=True is not available"),
        ({"global_batch_size": 9}, "global_batch_size=9 is no multiple of per_device_train_batch_size=8"),
        ({"global_batch_size": 16, "gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 contradicts"),
    ):
        with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
            arguments(**named)
