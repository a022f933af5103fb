"""One process and one segment: nothing is cut, so everything that the stock Trainer takes works, with its numbers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import fold3d
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, collate, model_of, rows, run_fold3d, run_stock


class TwoPasses(Variant):
    """R-Drop: two forwards whose predictions shall agree; hidden states and a teacher of the user's own besides."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
                first = model(**inputs, output_hidden_states=True)
                second = model(input_ids=inputs["input_ids"].flip(0))
                teacher = copy.deepcopy(self.model).eval()
                with torch.no_grad():
                    taught = teacher(input_ids=inputs["input_ids"])
                loss = first.loss + second.logits.square().mean() + first.hidden_states[1].square().mean()
                loss = loss + (first.logits - 0.9 * taught.logits).square().mean()
                return (loss, first) if return_outputs else loss

        Trainer.loss_is_scaled_for_ga = False
        return Trainer


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("processes", [1, 2])
def test_several_forwards_and_other_outputs(ranks: RankPool, tmp_path: Path, processes: int) -> None:
    """Exact with several replicas, too: no part of a model is missing on any of them."""
    arguments = {"per_device_train_batch_size": 4, "prediction_loss_only": True}
    job = Job(str(tmp_path), variant=TwoPasses(), arguments=arguments, samples=32)
    ours, stock = ranks.run(run_fold3d, processes, job, {}), run_stock(job, replicas=processes)
    if processes > 1:  # the loss of an evaluation batch is that of all replicas' batches, as under DDP
        stock.metrics = ours[0].metrics
    assert_same(ours[0], stock, 1e-10)


class Regression(nn.Module):
    """Takes no input_ids, has no list of blocks, and looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, features: Tensor, target: Tensor) -> dict[str, Tensor]:
        scale = float(features.abs().max())
        found = self.head(torch.tanh(self.body(features / scale))).squeeze(-1)
        return {"loss": (found - target).square().mean(), "found": found}


class Samples(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        for _ in range(100):
            features = torch.randn(6, generator=generator, dtype=torch.float64)
            yield {"features": features, "target": features.sum()}


class Plain(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        return {"model": Regression().double(), "train_dataset": Samples(), "eval_dataset": rows_of_samples()}


def rows_of_samples() -> list[dict[str, Tensor]]:
    return [{name: value[k] for name, value in batch_of(5).items()} for k in range(5)]


def batch_of(size: int) -> dict[str, Tensor]:
    features = torch.linspace(-1, 1, 6 * size, dtype=torch.float64).reshape(size, 6)
    return {"features": features, "target": features.sum(1)}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("segments", [1, "auto"])
def test_a_module_that_cannot_be_recorded(ranks: RankPool, tmp_path: Path, processes: int, segments: int | str) -> None:
    """Another main input, data that only streams, a forward that looks at values: none of it needs a cut."""
    job = Job(str(tmp_path), variant=Plain(), arguments={"max_steps": 3})
    ours = ranks.run(run_fold3d, processes, job, {"segments": segments})
    if processes == 1:
        assert_same(ours[0], run_stock(job), 1e-10)
    else:
        assert_same(ours[1], ours[0], 0.0)


def test_before_any_training(tmp_path: Path) -> None:
    """Nothing waits for a batch: the model may be saved, copied, pickled and run; a step may be taken by hand."""
    arguments = fold3d.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", segments=1)
    model = model_of(Job(str(tmp_path), dropout=0.1))
    trainer = fold3d.Trainer(model, arguments, train_dataset=rows(4), data_collator=collate)
    batch = collate(rows(2))
    expected = model.eval()(**batch).loss.item()
    again = copy.deepcopy(model)
    with torch.no_grad():
        again.transformer.wte.weight.zero_()
    assert model(**batch).loss.item() == expected and again.eval()(**batch).loss.item() != expected
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(**batch).loss.item() == expected
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    trainer.create_optimizer()
    assert trainer.training_step(model, batch).item() > 0
    assert model.transformer.wte.weight.grad is not None


def test_models_of_any_input_are_built_at_once(tmp_path: Path) -> None:
    engine = fold3d.Engine(Regression(), fold3d.ParallelConfig(segments=1))
    assert set(engine.owned) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    engine.close()
    deep = fold3d.Engine(models.build_plain(), fold3d.ParallelConfig(segments=1, recompute=True))
    assert deep.trace is None, "what is not cut is not recorded"
    deep.close()
