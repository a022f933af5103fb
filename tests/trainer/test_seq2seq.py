"""transformers' Seq2SeqTrainer on fold3d: it generates in evaluation, and its metrics and tokens are the stock ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fold3d
from tests.helpers.ranks import RankPool
from tests.trace import stacks


def dataset(count: int) -> list[dict[str, Tensor]]:
    """Returns samples of one length."""
    ids, labels = stacks.tokens(count, 9, 1), stacks.tokens(count, 6, 2)
    return [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


def metrics(evaluated: Any) -> dict[str, float]:
    """Returns numbers that depend on every token and its place."""
    tokens = torch.as_tensor(evaluated.predictions)
    places = torch.arange(tokens.numel()).view_as(tokens)
    return {"tokens": float((tokens * places).sum()), "length": float(tokens.shape[1])}


def evaluate(folder: str, layout: dict[str, Any], ways: dict[str, Any]) -> tuple[dict[str, float], list[Any], float]:
    """Returns metrics after two steps, what is predicted then, and the loss; of the stock trainer without layout."""
    Path(folder).mkdir(exist_ok=True)
    os.chdir(folder)
    base, arguments = transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
    model, _ = stacks.build("t5")
    trainer = (fold3d.trainer_class(base) if layout else base)(
        model=model,
        args=(fold3d.arguments_class(arguments) if layout else arguments)(
            output_dir=folder, max_steps=2, learning_rate=0.05, per_device_train_batch_size=2,
            per_device_eval_batch_size=2, predict_with_generate=True, generation_max_length=8, report_to=[],
            use_cpu=True, save_strategy="no", optim="adamw_torch", **ways, **layout,
        ),
        train_dataset=dataset(8),
        eval_dataset=dataset(8),
        compute_metrics=metrics,
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    predicted = trainer.predict(dataset(4), max_new_tokens=5, num_beams=2)
    if layout:
        assert "generate" not in vars(trainer.model)
        trainer.engine.close()
    return (
        {name: found[name] for name in ("eval_tokens", "eval_length")},
        predicted.predictions.tolist(),
        found["eval_loss"],
    )


LAYOUTS: list[dict[str, Any]] = [{"pp": 2, "segments": 1}, {"dp": 2, "segments": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_as_stock(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    ways: dict[str, Any] = {"gradient_accumulation_steps": 1 if "dp" in layout else 2}
    stock = ways | {"gradient_accumulation_steps": 2}
    want, tokens, loss = evaluate(str(tmp_path / "stock"), {}, stock)
    for found, predicted, ours in ranks.run(evaluate, 2, str(tmp_path / "ours"), layout, ways):
        assert found == want and predicted == tokens
        if "dp" not in layout:  # of replicas the stock loss is not that of one process, either
            assert ours == pytest.approx(loss, rel=1e-6)
