"""trainer_class and arguments_class: a trainer of another library, with fold3d's in the place of transformers'."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fold3d
from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, rows, run_fold3d, run_stock


@dataclass
class TheirArguments(transformers.TrainingArguments):
    """Those of a library: with a default of its own and a field of its own, worked out at the end."""

    learning_rate: float = field(default=3e-2)
    bf16: bool | None = field(default=None)  # type: ignore[assignment]
    smoothing: float = field(default=0.25)

    def __post_init__(self) -> None:
        self.bf16 = bool(self.bf16)
        super().__post_init__()  # type: ignore[no-untyped-call]


class TheirTrainer(transformers.Trainer):
    """That of a library: metrics of its own beside the loss, gathered and averaged in its logs, as TRL's have them."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.sums: dict[str, list[Any]] = {"entropy": [], "worst": []}
        self.tokens = 0
        self.seen: dict[str, torch.Tensor] = {}

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs["use_cache"] = False
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        logs = outputs["logits"][:, :-1].log_softmax(-1)
        labels = inputs["labels"][:, 1:]
        seen = labels != -100
        losses = -logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * seen
        count = seen.sum() if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / torch.as_tensor(count).clamp(min=1)
        if num_items_in_batch is not None:  # of all replicas, over which gradients are averaged
            loss = loss * self.accelerator.num_processes
        entropy = -(logs.exp() * logs).sum(-1)
        gathered = self.accelerator.gather_for_metrics((entropy.detach() * seen).sum()[None])
        self.sums["entropy"].append(gathered.sum().item())
        self.sums["worst"].append(losses.detach().max())
        self.tokens += int(self.accelerator.gather_for_metrics(seen.sum()[None]).sum())
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        assert isinstance(model, transformers.PreTrainedModel), "the stock code asks for PEFT's in this way"
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, None if prediction_loss_only else outputs["logits"], inputs["labels"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        prefix = "" if self.model.training else "eval_"
        if self.sums["entropy"]:
            logs[f"{prefix}entropy"] = sum(self.sums["entropy"])
            logs[f"{prefix}worst"] = float(max(self.sums["worst"]))
        logs[f"{prefix}num_tokens"] = self.tokens
        super().log(logs, start_time)
        self.sums = {"entropy": [], "worst": []}


class Theirs(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"eval_dataset": rows(8, seed=4)}  # replicas fill up the last batch with samples seen before

    def trainer(self, base: type[Any]) -> type[Any]:
        return TheirTrainer if base is transformers.Trainer else fold3d.trainer_class(TheirTrainer)


LOGS = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "per_device_eval_batch_size": 2}


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "segments": 2}, {"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_trainer_of_another_library(layout: dict[str, int], ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), variant=Theirs(), arguments=LOGS, metrics=True)
    replicas = layout.get("dp", 1)
    stock = run_stock(job, replicas=replicas)
    assert {"entropy", "worst", "num_tokens"} < stock.logs[0].keys()
    assert stock.logs[1]["eval_num_tokens"] > 0
    for ours in ranks.run(run_fold3d, replicas * layout.get("pp", 1), job, layout):
        if replicas > 1:  # what one replica has seen of its own is its own, as with DistributedDataParallel
            for entry in (*ours.logs, ours.metrics, *stock.logs, stock.metrics):
                entry.pop("worst", None), entry.pop("eval_worst", None)
        assert_same(ours, stock, 1e-10)


def test_arguments_have_their_defaults_and_fields() -> None:
    kind = fold3d.arguments_class(TheirArguments)
    args = kind(output_dir="out", use_cpu=True, smoothing=0.5)
    assert (args.learning_rate, args.bf16, args.smoothing, args.pp) == (3e-2, False, 0.5, 1)
    assert isinstance(args, TheirArguments)
    assert isinstance(args, fold3d.TrainingArguments)
    assert kind is fold3d.arguments_class(TheirArguments)
    kept = io.BytesIO()
    torch.save(args, kept)  # as checkpoints do
    kept.seek(0)
    again = torch.load(kept, weights_only=False)
    assert type(again) is kind
    assert again.to_dict() == args.to_dict()


def test_what_is_there_already_is_taken() -> None:
    assert fold3d.trainer_class(transformers.Trainer) is fold3d.Trainer
    assert fold3d.trainer_class(fold3d.Trainer) is fold3d.Trainer
    assert fold3d.arguments_class(transformers.TrainingArguments) is fold3d.TrainingArguments


@pytest.mark.parametrize("wrong", [TheirArguments, "SFTTrainer", TheirTrainer.log])
def test_what_is_no_trainer_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer_class\(.*must be a class derived from transformers\.Trainer"):
        fold3d.trainer_class(wrong)
    with pytest.raises(ConfigError, match=r"arguments_class\(.*derived from transformers\.TrainingArguments"):
        fold3d.arguments_class(TheirTrainer)  # type: ignore[arg-type]
