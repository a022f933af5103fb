"""What leaves for the hub, the model's own load_state_dict, model logging, and a second Trainer on a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, MixtralConfig
from transformers.integrations.integration_utils import WandbCallback, WandbLogModel

import fold3d
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, collate, rows, stock_arguments


def trainer_of(folder: Path | str, model: torch.nn.Module, arguments: dict[str, Any], **named: Any) -> Any:
    args = fold3d.TrainingArguments(**stock_arguments(Job(str(folder), arguments={"max_steps": 1})) | arguments)
    return fold3d.Trainer(
        args=args, model=model, train_dataset=rows(8), eval_dataset=rows(4), data_collator=collate, **named
    )


def mixtral() -> torch.nn.Module:
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=32,
    )  # fmt: skip
    return models.build(config, dtype=torch.bfloat16)


def push(folder: str, layout: dict[str, Any]) -> list[str] | None:
    """Returns the names in the file that was uploaded, by this rank."""
    uploaded: list[str] = []

    def upload_folder(*, folder_path: str, **_: Any) -> None:
        uploaded.extend(load_file(Path(folder_path) / "model.safetensors"))

    trainer = trainer_of(folder, mixtral(), {"max_steps": 1, **layout})
    trainer.init_hf_repo = lambda **_: None
    trainer.create_model_card = lambda **_: None
    original = transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda: SimpleNamespace(upload_folder=upload_folder)
    try:
        trainer.push_to_hub()
    finally:
        transformers.trainer.hf_api = original
        trainer.engine.close()
    return sorted(uploaded)


def test_the_hub_gets_what_the_stock_trainer_would_upload(ranks: RankPool, tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path / "stock")  # type: ignore[operator]
    wanted = sorted(load_file(tmp_path / "stock" / "model.safetensors"))
    first, second = ranks.run(push, 2, str(tmp_path / "ours"), {"pp": 2, "segments": 1})
    assert first == wanted and second == []


class Own(GPT2LMHeadModel):
    """Knows a weight by another name."""

    loaded = 0

    def load_state_dict(self, state_dict: Any, *args: Any, **named: Any) -> Any:
        self.loaded += 1
        return super().load_state_dict(state_dict, *args, **named)


def own_loading(folder: str, layout: dict[str, Any]) -> str:
    """Saves, and resumes a model with a load_state_dict of its own; returns the error or how often it was called."""
    saving = {"save_strategy": "steps", "save_steps": 1, **layout}
    trainer_of(folder, Own(models.gpt2_config()), saving).train()
    model = Own(models.gpt2_config())
    trainer = trainer_of(folder, model, {**saving, "max_steps": 2})
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    except fold3d.CheckpointError as error:
        return str(error)
    return str(model.loaded)


def test_the_models_own_load_state_dict(ranks: RankPool, tmp_path: Path) -> None:
    assert own_loading(str(tmp_path / "one"), {"segments": 2}) == "1"
    errors = ranks.run(own_loading, 2, str(tmp_path / "two"), {"pp": 2, "segments": 1})
    assert all("Own overrides load_state_dict" in error and "pp=1" in error for error in errors)


class Wandb(WandbCallback):
    """transformers' own, without the library."""

    def __init__(self) -> None:
        self._log_model = WandbLogModel.END


@pytest.mark.full
def test_model_logging_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(fold3d.ConfigError, match=r"WANDB_LOG_MODEL=end is not available.*trainer\.save_model"):
        trainer_of(tmp_path, models.build(models.gpt2_config()), {"segments": 1}, callbacks=[Wandb()])


def two_trainers(folder: str, layout: dict[str, Any]) -> tuple[float, float]:
    """Trains with one, evaluates with both."""
    model = models.build(models.gpt2_config(), dtype=torch.float64)
    trainer = trainer_of(folder, model, layout)
    trainer.train()
    one = trainer.evaluate()["eval_loss"]
    del trainer
    other = trainer_of(folder, model, layout)
    two = other.evaluate()["eval_loss"]
    other.train()
    other.save_model(f"{folder}/again")
    return one, two


@pytest.mark.parametrize(
    "layout", [{"segments": 1}, {"segments": 2}, {"pp": 2, "segments": 1}, {"dp": 2, "segments": 1}]
)
def test_a_second_trainer_on_the_model(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    for one, two in ranks.run(two_trainers, max(layout.get("pp", 1), layout.get("dp", 1)), str(tmp_path), layout):
        assert one == two
