"""Arguments that the stock code carries out mean the same over replicas and stages.

docs/compatibility.toml names these tests; arguments with a test of their own are elsewhere in this folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
TOGETHER: dict[str, dict[str, Any]] = {
    "optimizer, data, logging": {
        "optim": "adamw_torch",
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-3,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-3},
        "warmup_steps": 0.5,
        "data_seed": 5,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
        "num_train_epochs": 2,
        "max_steps": -1,
        "logging_strategy": "epoch",
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "use_cache": True,
        "ddp_backend": "gloo",
        "local_rank": 0,
    },
    "another optimizer, tokens of the own replica, recomputing": {
        "optim": "rmsprop",
        "optim_args": "alpha=0.7",
        "average_tokens_across_devices": False,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "torch_empty_cache_steps": 1,
    },
    "evaluation, lengths, best model": EVERY_STEP
    | {
        "train_sampling_strategy": "group_by_length",
        "length_column_name": "length",
        "eval_delay": 2,
        "eval_accumulation_steps": 1,
        "eval_use_gather_object": True,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "greater_is_better": False,
        "save_only_model": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
}


class LeavesFiles(Variant):
    """What of the run is found afterwards."""

    def after(self, trainer: Any) -> Any:
        best = trainer.state.best_model_checkpoint
        folder = Path(trainer.args.output_dir)
        return Path(best or "").name, sorted(path.name for path in folder.glob("checkpoint-*/optimizer.pt"))


@pytest.mark.parametrize("name", TOGETHER)
def test_means_the_same(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Two replicas of two stages against the stock Trainer on two processes."""
    arguments = TOGETHER[name]
    stock = Job(str(tmp_path / "stock"), arguments=arguments, samples=20, metrics=True, variant=LeavesFiles())
    ours = Job(str(tmp_path / "ours"), arguments=arguments, samples=20, metrics=True, variant=LeavesFiles())
    spread, alone = ranks.run(run_fold3d, 4, ours, {"dp": 2, "pp": 2}), ranks.run(run_stock, 2, stock)[0]
    assert_same(spread[0], alone, 1e-10)
    assert spread[0].extra == alone.extra
    assert (alone.extra != ("", [])) == ("best model" in name)


def test_resuming_as_told(ranks: RankPool, tmp_path: Path) -> None:
    """From the middle of an epoch, without passing over the samples seen before."""
    saved = Job(str(tmp_path / "first"), arguments={"save_strategy": "steps", "save_steps": 3})
    run_stock(saved)
    told = {"ignore_data_skip": True, "restore_callback_states_from_checkpoint": True, "max_steps": 8}
    resumed = [
        Job(str(tmp_path / name), arguments=told, resume=str(tmp_path / "first" / "checkpoint-3"))
        for name in ("ours", "stock")
    ]
    spread, alone = ranks.run(run_fold3d, 2, resumed[0], {"pp": 2})[0], run_stock(resumed[1])
    assert_same(spread, alone, 1e-10)
    passing = run_stock(
        Job(str(tmp_path / "third"), arguments=told | {"ignore_data_skip": False}, resume=resumed[1].resume)
    )
    assert passing.logs != alone.logs
