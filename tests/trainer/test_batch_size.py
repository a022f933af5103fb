"""auto_find_batch_size: memory that runs out on one rank makes all of them go on with smaller batches."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock

ARGUMENTS = {"auto_find_batch_size": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


class Short(Variant):
    """Memory runs out on the last rank where more than `most` samples are in a batch, from step `step` on."""

    def __init__(self, most: int, step: int = 0) -> None:
        self.most, self.step = most, step
        self.trainer_: Any = None

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        embedding = named["model"].get_input_embeddings()
        head = named["model"].get_output_embeddings()
        for module in (embedding, head):
            module.register_forward_hook(self.look)
        return named

    def look(self, module: Any, args: Any, output: Tensor) -> None:
        """The hook."""
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        trainer = self.trainer_
        is_recorded = output.is_meta or isinstance(output, FakeTensor)
        if trainer is None or not module.training or not is_last or is_recorded:
            return
        if trainer.state.global_step >= self.step and len(output) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    def trainer(self, base: type[Any]) -> type[Any]:
        variant = self

        class Trainer(base):  # type: ignore[misc]
            reads_gradients = False

            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                variant.trainer_ = self

        return Trainer

    def after(self, trainer: Any) -> Any:
        self.trainer_ = None
        return trainer._train_batch_size, trainer.state.train_batch_size


@pytest.mark.parametrize(
    "processes, layout",
    [
        (1, {}),
        (2, {"pp": 2, "segments": 2}),
        (2, {"dp": 2, "dp_sync": "zero1"}),
        (4, {"dp": 2, "pp": 2, "segments": 2, "dp_sync": "early"}),
    ],
)
def test_all_ranks_take_less(ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any]) -> None:
    job = Job(str(tmp_path), samples=32, variant=Short(2), arguments=ARGUMENTS)
    stock = run_stock(job, replicas=layout.get("dp", 1))
    assert stock.extra == (2, 2)
    for ours in ranks.run(run_fold3d, processes, job, layout):
        assert ours.extra == (2, 2)
        stock.metrics = ours.metrics if layout.get("dp") else stock.metrics
        assert_same(ours, stock, 1e-10)


def late(job: Job, layout: dict[str, Any]) -> str:
    """Returns the error of a training in which memory runs out after a step."""
    with pytest.raises(ConfigError) as caught:
        run_fold3d(job, layout)
    return str(caught.value)


def test_after_a_step(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), samples=32, variant=Short(2, step=1), arguments=ARGUMENTS)
    for told in ranks.run(late, 2, replace(job), {"pp": 2}):
        assert "auto_find_batch_size=4 fitted at first" in told and "can't allocate memory" in told


def test_no_size_is_small_enough(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), samples=32, variant=Short(0), arguments=ARGUMENTS)
    for told in ranks.run(hopeless, 2, job, {"pp": 2}):
        assert told == "No executable batch size found, reached zero."


def hopeless(job: Job, layout: dict[str, Any]) -> str:
    """Returns the error of a training for which there is never enough memory."""
    with pytest.raises(RuntimeError) as caught:
        run_fold3d(job, layout)
    return str(caught.value)


def test_the_size_that_was_found_is_gone_on_with(ranks: RankPool, tmp_path: Path) -> None:
    saves = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    job = Job(str(tmp_path / "ours"), samples=32, variant=Short(2), arguments=ARGUMENTS | saves)
    ranks.run(run_fold3d, 1, job, {})
    shutil.copytree(tmp_path / "ours", tmp_path / "stock")
    more = ARGUMENTS | {"max_steps": 3}
    from_there = str(tmp_path / "stock" / "checkpoint-1")
    stock = run_stock(replace(job, folder=str(tmp_path / "stock"), arguments=more, resume=from_there))
    (ours,) = ranks.run(run_fold3d, 1, replace(job, arguments=more), {"resume": "auto"})
    assert ours.extra == stock.extra == (2, 2)
    assert_same(ours, stock, 1e-10)
