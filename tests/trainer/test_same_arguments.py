"""Processes that train with other arguments than the first end before the first step, and are told which."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch.distributed as dist

import fold3d
from fold3d.trainer.same_arguments import OWN
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, stock_arguments, trainer_arguments

pytestmark = pytest.mark.dist


def trained(folder: str, others: dict[str, Any], layout: dict[str, Any]) -> str:
    """Returns why the training ends on this rank; rank 1 has `others` among its arguments."""
    job = Job(folder, arguments={"max_steps": 1} | (others if dist.get_rank() == 1 else {}))
    try:
        args = fold3d.TrainingArguments(**stock_arguments(job), **layout, segments=1, comm_timeout=60)
        trainer = fold3d.Trainer(args=args, **trainer_arguments(job))
        trainer.train()
        trainer.engine.close()
    except fold3d.ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 1, "pp": 2}], ids=["dp2", "pp2"])
def test_a_difference_is_named(ranks: RankPool, tmp_path: Any, layout: dict[str, Any]) -> None:
    for name, value, usual in (("learning_rate", 0.02, 0.01), ("seed", 12, 11), ("max_grad_norm", 0.5, 1.0)):
        for text in ranks.run(trained, 2, str(tmp_path), {name: value}, layout, timeout=120):
            assert f"ranks [1] have another {name} than rank 0: {value} on rank 1, and {usual} there" in text
    allowed = {"disable_tqdm": False, "output_dir": str(tmp_path / "other"), "run_name": "another"}
    assert ranks.run(trained, 2, str(tmp_path), allowed, layout, timeout=120) == ["no error"] * 2


def test_what_may_differ_are_arguments() -> None:
    known = {field.name for field in fields(fold3d.TrainingArguments)}
    assert known | {"logging_dir"} >= OWN, "newer versions of transformers have no logging_dir"
    assert not OWN & {"learning_rate", "seed", "gradient_accumulation_steps", "max_grad_norm", "weight_decay"}
