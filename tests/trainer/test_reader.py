"""transformers' own Trainer with fold3d's arguments is an error, and nothing else that uses them is."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fold3d
from fold3d.errors import ConfigError
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import collate, rows


class OwnTrainer(transformers.Trainer):
    """As the trainers of TRL are."""


class Arguments(fold3d.TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """Both kinds at once."""


class GoodTrainer(fold3d.Trainer, transformers.Seq2SeqTrainer):
    """What the message advises."""


def arguments(folder: str, kind: Any = fold3d.TrainingArguments, **named: Any) -> Any:
    return kind(output_dir=folder, use_cpu=True, report_to="none", max_steps=1, save_strategy="no", **named)


def build(trainer: Any, args: Any) -> Any:
    model = models.build(models.MODELS["gpt2"](layers=2))
    return trainer(model=model, args=args, train_dataset=rows(4), data_collator=collate)


@pytest.mark.parametrize("kind", [transformers.Trainer, transformers.Seq2SeqTrainer, OwnTrainer])
def test_the_stock_trainer_is_refused(tmp_path: Path, kind: Any) -> None:
    """Also where nothing is asked of fold3d: the import is wrong all the same."""
    args = arguments(str(tmp_path / "out"), Arguments)
    with pytest.raises(ConfigError, match=r"from fold3d import Trainer, TrainingArguments") as caught:
        build(kind, args)
    text = str(caught.value)
    assert text.startswith(f"{kind.__name__} is transformers' own Trainer or derived from it")
    assert (f"fold3d.trainer_class({kind.__name__})" in text) == (kind is not transformers.Trainer)
    assert not (tmp_path / "out").exists(), "nothing was begun"
    build(GoodTrainer, args).train()
    with pytest.raises(ConfigError):  # that a Trainer of fold3d's had them first changes nothing
        build(kind, args)


def _refused(folder: str) -> str:
    try:
        build(transformers.Trainer, arguments(folder, pp=2))
    except ConfigError as error:
        return str(error)
    return "trained"


def test_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(_refused, 2, str(tmp_path))
    assert said[0] == said[1] and "from fold3d import Trainer" in said[0]


def test_whoever_only_looks_at_the_arguments_may(tmp_path: Path) -> None:
    args = arguments(str(tmp_path))
    assert args.place_model_on_device is False
    assert dict(inspect.getmembers(args))["place_model_on_device"] is False
    assert "place_model_on_device" not in args.to_dict() and args.to_json_string()
    assert args.get_process_log_level() is not None and args.device.type == "cpu"
    for again in (copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert again.to_dict() == args.to_dict()


def test_saved_arguments_serve_again(tmp_path: Path) -> None:
    trainer = build(fold3d.Trainer, arguments(str(tmp_path)))
    trainer.save_model()
    args = torch.load(tmp_path / "training_args.bin", weights_only=False)
    with pytest.raises(ConfigError, match="from fold3d import Trainer"):
        build(transformers.Trainer, args)
    build(fold3d.Trainer, args).train()


def test_stock_arguments_and_stock_trainer_are_left_alone(tmp_path: Path) -> None:
    build(transformers.Trainer, arguments(str(tmp_path), transformers.TrainingArguments)).train()


def test_an_optimizer_whose_library_is_missing_ends_before_the_start(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), optim="grokadamw")
    with pytest.raises(ConfigError, match=r"optim='grokadamw' cannot be had: .*pip install grokadamw"):
        build(fold3d.Trainer, args)
