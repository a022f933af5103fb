"""Engine.step divides by as many labels as the stock loss does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CLIPVisionConfig,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.loss.loss_utils import ForMaskedLMLoss

import fold3d
from fold3d import Engine, ParallelConfig
from fold3d.engine.loss import token_share
from fold3d.trace.shadow import fake
from tests.helpers import data, models

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ROWS, LENGTH = 4, 9


def bert(**named: Any) -> BertConfig:
    return BertConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **named,
    )


def llava() -> PreTrainedModel:
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = models.llama_config(layers=2)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=1))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=models.VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def ragged() -> dict[str, Tensor]:
    """Rows with different numbers of labels, which begin at the first position or later."""
    batch = data.batch(ROWS, LENGTH, ragged=True)
    batch["labels"][1, :2] = -100
    return batch


def first_step(model: nn.Module, batch: dict[str, Any]) -> float:
    """Returns the loss of a step of two micro-batches."""
    config = ParallelConfig(segments=1, micro_batches=2)
    engine = Engine(model, config, optimizer=SGD, example={name: value[:2] for name, value in batch.items()})
    loss = engine.step(batch).loss.item()
    engine.close()
    return loss


def modern_bert() -> PreTrainedModel:
    return ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=models.VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            cls_token_id=0,
            sep_token_id=0,
        )
    )


@pytest.mark.parametrize("kind", ["causal", "masked", "conditional"])
def test_the_mean_over_labels_is_the_stock_loss_of_the_whole_batch(kind: str) -> None:
    made = {"causal": lambda: models.build(models.llama_config(layers=2)), "masked": modern_bert, "conditional": llava}
    torch.manual_seed(0)
    model, batch = made[kind]().train(), ragged()
    expected = model(**batch).loss.item()
    assert first_step(model, batch) == pytest.approx(expected, rel=1e-5)


class Own(GPT2LMHeadModel):
    """A model of the user's with a loss of its own, over all labels."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:
        logits = super().forward(input_ids=input_ids).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)}


@pytest.mark.parametrize("kind", ["own", "fallback", "given"])
def test_a_class_whose_name_says_nothing_of_its_loss(kind: str) -> None:
    """`loss_type` is None: transformers falls back to ForCausalLMLoss, where the forward asks for `loss_function`."""
    torch.manual_seed(0)
    model: PreTrainedModel = (Own if kind == "own" else GPT2LMHeadModel)(models.gpt2_config(layers=2)).train()
    if kind == "given":
        model.loss_function = ForMaskedLMLoss
    assert model.loss_type is None
    batch = {name: value for name, value in ragged().items() if name in ("input_ids", "labels")}
    expected = model(**batch).loss.item() if kind != "own" else model(**batch)["loss"].item()
    assert first_step(model, batch) == pytest.approx(expected, rel=1e-5)


def test_the_trainer_divides_as_the_stock_one(tmp_path: Path) -> None:
    """Which counts all labels of such a model: 4.17 by the model, 3.82 in both Trainers' logs."""
    losses = []
    for kind, arguments in (
        (transformers.Trainer, transformers.TrainingArguments),
        (fold3d.Trainer, fold3d.TrainingArguments),
    ):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(models.gpt2_config(layers=2))
        batch = data.batch(ROWS, LENGTH)
        args = arguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=1, per_device_train_batch_size=ROWS, save_strategy="no"
        )
        args.logging_steps, args.report_to, args.disable_tqdm = 1, [], True
        samples = [{"input_ids": row, "labels": row} for row in batch["input_ids"]]
        trainer = kind(model=model, args=args, train_dataset=samples)
        expected = model.train()(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.item()
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] == pytest.approx(expected * (LENGTH - 1) / LENGTH, rel=1e-5)


def test_labels_that_are_shifted_already() -> None:
    model, batch = models.build(models.llama_config(layers=2)), ragged()
    shifted = torch.full_like(batch["labels"], -100)
    shifted[:, :-1] = batch["labels"][:, 1:]
    shifted[2] = -100  # as at the borders of packed samples; `labels` still has some there
    batch["shift_labels"] = shifted
    expected = model(**batch).loss.item()
    assert first_step(model, batch) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["regression", "masked", "encoder-decoder"])
def test_a_loss_that_does_not_look_at_the_count(kind: str) -> None:
    """These take `num_items_in_batch` and return a mean of their own: micro-batches count alike."""
    made = {
        "regression": lambda: BertForSequenceClassification(bert(num_labels=1)),
        "masked": lambda: BertForMaskedLM(bert()),
        "encoder-decoder": t5,
    }
    torch.manual_seed(0)
    model, batch = made[kind]().train(), ragged()
    if kind == "regression":
        batch["labels"] = torch.rand(ROWS)
    halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    expected = sum(model(**half).loss.item() for half in halves) / 2
    assert first_step(model, batch) == pytest.approx(expected, rel=1e-5)


def test_to_record_a_call_is_not_to_use_the_count() -> None:
    """A model that is cut records the call's form; the loss of one that is a mean must stay one in that step."""

    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
            fake(num_items_in_batch, FakeTensorMode())
            assert num_items_in_batch.dtype == torch.int64 and num_items_in_batch.stride() == ()
            return x.mean()

    share = token_share(torch.tensor(7), 1, 4)
    assert share(Mean(), {"x": torch.ones(3)}).item() == 0.25
