"""What a user's compute_loss does besides calling the model: as in the stock Trainer, on every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fold3d
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, stock_arguments

pytestmark = pytest.mark.dist

STEPS, MICRO_BATCHES = 3, 4


class Meter:
    """A metric of the user's."""

    def __init__(self) -> None:
        self.count, self.last = 0, np.zeros(1)

    def update(self, value: float) -> None:
        self.count += 1
        self.last[0] = round(value, 8)


def with_state(base: type[Any]) -> type[Any]:
    """A Trainer of `base` whose loss counts, draws, logs, and keeps values for behind the model's call."""

    class Annealed(base):  # type: ignore[misc]
        calls = 0

        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            self.weight = 1 + inputs["input_ids"].double().mean() / 100
            return inputs

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self.largest = inputs["input_ids"].max().item()
            return super().training_step(model, inputs, num_items_in_batch)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            self.calls += 1
            if not hasattr(self, "rng"):
                self.rng = np.random.default_rng(0)
                self.seen, self.meter = [], Meter()
            self.mask = mask = torch.from_numpy(self.rng.random(inputs["input_ids"].shape) < 0.15)
            labels = torch.where(self.mask, inputs["labels"], -100)
            labels[:, -1] = inputs["labels"][:, -1]
            inputs = inputs | {"input_ids": torch.where(self.mask, 3, inputs["input_ids"]), "labels": labels}
            factor = min(1.0, self.calls / 10)
            out = model(**inputs)
            assert self.mask is mask, "other micro-batches have begun meanwhile"
            self.log({"ce": out.loss.item(), "masked": int(self.mask.sum())})
            self.seen.append(round(out.loss.item(), 8))
            self.meter.update(out.loss.item())
            loss = factor * out.loss * self.weight / self.largest
            return (loss, out) if return_outputs else loss

    return Annealed


def train(folder: str, layout: dict[str, Any] | None) -> tuple[list[float], list[Any], int, list[float]]:
    """Returns losses, what was logged of the parts with its steps, the number of calls and what the trainer kept, with
    an evaluation of one batch behind the training."""
    torch.manual_seed(5)
    model = models.build(models.gpt2_config(layers=4), dtype=torch.float64)
    ids = torch.randint(
        6, models.VOCABULARY, (STEPS * MICRO_BATCHES * 2, 8), generator=torch.Generator().manual_seed(1)
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    job = Job(folder, arguments={"max_steps": STEPS, "train_sampling_strategy": "sequential"})
    named = stock_arguments(job) | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES}
    if layout is None:
        args: Any = transformers.TrainingArguments(**named)
    else:
        args = fold3d.TrainingArguments(**named | layout)
    trainer = with_state(transformers.Trainer if layout is None else fold3d.Trainer)(
        model=model, args=args, train_dataset=rows
    )
    trainer.train()
    trainer.evaluate(rows[:2])  # type: ignore[arg-type]
    logs = trainer.state.log_history
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    parts = [(entry["step"], round(entry["ce"], 8), entry["masked"]) for entry in logs if "ce" in entry]
    if layout is not None:
        trainer.engine.close()
    return losses, parts, trainer.calls, [*trainer.seen, trainer.meter.count, *trainer.meter.last]


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"segments": 2}),
    (2, {"pp": 2, "segments": 1}),
    (2, {"pp": 2, "segments": 2, "schedule": "aiao"}),
    (2, {"tp": 2, "segments": 1}),
    (4, {"tp": 2, "pp": 2, "segments": 1, "tp_overlap": "sub"}),
]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=lambda one: str(one))
def test_as_the_stock_trainer(ranks: RankPool, tmp_path: Any, processes: int, layout: dict[str, Any]) -> None:
    """Every process counts, draws and logs what the stock Trainer does; also what the last stage alone has seen."""
    losses, parts, calls, seen = train(str(tmp_path), None)
    assert calls == STEPS * MICRO_BATCHES + 1 == len(parts)
    for found, logged, own_calls, own_seen in ranks.run(train, processes, str(tmp_path), layout, timeout=300):
        assert found == pytest.approx(losses, rel=1e-6)
        assert own_calls == calls
        assert [entry[0] for entry in logged] == [entry[0] for entry in parts]
        assert [entry[2] for entry in logged] == [entry[2] for entry in parts]
        assert [entry[1] for entry in logged] == pytest.approx([entry[1] for entry in parts], rel=1e-6)
        assert own_seen == pytest.approx(seen, rel=1e-6)
