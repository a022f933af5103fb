"""What a user's script may add keeps working when the model is spread over processes."""

from __future__ import annotations

import json
import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import fold3d
from fold3d.errors import ConfigError
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, collate, model_of, rows, run_fold3d, run_stock

FOLDED = {"pp": 2, "segments": 2}


def against_stock(ranks: RankPool, tmp_path: Path, variant: Variant, **changes: Any) -> tuple[Any, Any]:
    """Runs a job on two stages and by the stock Trainer, compares both; returns what they left as extra."""
    job = Job(str(tmp_path), variant=variant, **changes)
    ours, stock = ranks.run(run_fold3d, 2, job, FOLDED), run_stock(job)
    assert_same(ours[0], stock, 1e-10)
    assert_same(ours[1], ours[0], 0.0)
    return ours[0].extra, stock.extra


class OwnLoss(Variant):
    """A Trainer with a compute_loss of its own: label smoothing and a penalty on the logits."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                logits = outputs.logits[:, :-1].flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.2)
                loss = loss + 1e-3 * logits.square().mean()
                return (loss, {"loss": loss, "logits": outputs.logits}) if return_outputs else loss

        Trainer.loss_is_scaled_for_ga = False
        return Trainer


def test_compute_loss_override(ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"per_device_train_batch_size": 4}  # no micro-batch without labels: its mean is not a number
    against_stock(ranks, tmp_path, OwnLoss(), arguments=arguments, metrics=True)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A compute_loss_func, divided by the labels of the whole batch."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def largest(logits: Tensor, labels: Tensor) -> Tensor:
    """A preprocess_logits_for_metrics."""
    return logits.argmax(-1)


def hits(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"hits": float((prediction.predictions == prediction.label_ids).sum())}


class Functions(Variant):
    """compute_loss_func, preprocess_logits_for_metrics and compute_metrics."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {
            "compute_loss_func": summed,
            "preprocess_logits_for_metrics": largest,
            "compute_metrics": hits,
        }


def test_functions_and_micro_batches_without_labels(ranks: RankPool, tmp_path: Path) -> None:
    against_stock(ranks, tmp_path, Functions(), arguments={"per_device_train_batch_size": 1})


class Events(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes down every event, and stops training after the third step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_step_end":
            return lambda *args, **named: self.seen.append(name)
        return super().__getattribute__(name)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        self.seen.append("on_step_end")
        assert named["model"] is not None and named["optimizer"] is not None
        control.should_training_stop = state.global_step >= 3
        return control


class WithCallback(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [Events()]}

    def after(self, trainer: Any) -> Any:
        return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Events)).seen


@pytest.mark.gate
def test_callbacks_fire_in_the_stock_order(ranks: RankPool, tmp_path: Path) -> None:
    ours, stock = against_stock(ranks, tmp_path, WithCallback())
    assert ours == stock and ours.count("on_step_end") == 3 and "on_substep_end" in ours


class EarlyStopping(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [transformers.EarlyStoppingCallback(early_stopping_patience=2)]}

    def after(self, trainer: Any) -> Any:
        return trainer.state.global_step, Path(trainer.state.best_model_checkpoint).name


def test_early_stopping(ranks: RankPool, tmp_path: Path) -> None:
    arguments = {
        "eval_strategy": "steps",
        "save_strategy": "best",
        "eval_steps": 1,
        "max_steps": 8,
        "learning_rate": 0.5,
        "load_best_model_at_end": True,
    }
    ours, stock = against_stock(ranks, tmp_path, EarlyStopping(), arguments=arguments, samples=40)
    assert ours == stock and ours[0] < 8


class Predicts(Variant):
    """Evaluates before training, predicts after it, with and without labels."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def train(self, *args: Any, **named: Any) -> Any:
                self.before = self.evaluate()["eval_loss"]
                return super().train(*args, **named)

        return Trainer

    def after(self, trainer: Any) -> Any:
        test = rows(5, seed=9)
        labelled = trainer.predict(test)
        unlabelled = trainer.predict([{"input_ids": row["input_ids"], "labels": None} for row in test[:1]])
        steps = labelled.metrics["test_steps_per_second"] * labelled.metrics["test_runtime"]
        return (trainer.before, steps), *labelled.predictions, labelled.label_ids, *unlabelled.predictions


def collate_some(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    if samples[0]["labels"] is None:
        return {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}
    return collate(samples)


class PredictsSome(Predicts):
    """Predicts a single number per batch, too, of which filling cannot be cut off."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        measured = {"preprocess_logits_for_metrics": lambda logits, labels: (logits, logits.square().mean())}
        return named | measured | {"data_collator": collate_some}


@pytest.mark.gate
def test_predict_and_evaluate_before_training(ranks: RankPool, tmp_path: Path) -> None:
    ours, stock = against_stock(ranks, tmp_path, PredictsSome())
    (before, steps), (stock_before, _) = ours[0], stock[0]  # one process may be done before its clock moves
    assert before == pytest.approx(stock_before, abs=1e-6)
    assert steps == pytest.approx(2, rel=0.2), "steps are those of a replica: five rows by batches of a replica's size"
    for mine, theirs in zip(ours[1:], stock[1:], strict=True):
        assert mine.shape == theirs.shape
        assert abs(mine - theirs).max() < 1e-9


class OwnOptimizer(Variant):
    """SGD made over the model before the Trainer sees it, and a scheduler of its own."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        parameters = list(named["model"].parameters())
        groups = [{"params": parameters[::2], "momentum": 0.8}, {"params": parameters[1::2]}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return named | {"optimizers": (optimizer, scheduler)}

    def after(self, trainer: Any) -> Any:
        trainer._save_optimizer_and_scheduler(trainer.args.output_dir)
        if not trainer.is_world_process_zero():
            return None
        return torch.load(Path(trainer.args.output_dir) / "optimizer.pt", weights_only=True)


def test_optimizer_of_the_user(ranks: RankPool, tmp_path: Path) -> None:
    ours, stock = against_stock(ranks, tmp_path, OwnOptimizer())
    assert ours["param_groups"] == stock["param_groups"] and ours["state"].keys() == stock["state"].keys()


class Stream(IterableDataset[dict[str, Tensor]]):
    """Samples without a length."""

    def __iter__(self) -> Any:
        return iter(rows(64))


class Streams(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"train_dataset": Stream()}


def test_iterable_dataset(ranks: RankPool, tmp_path: Path) -> None:
    against_stock(ranks, tmp_path, Streams())
    job = Job(str(tmp_path), variant=Streams())
    spread = ranks.run(run_fold3d, 4, job, {"dp": 2, "pp": 2})[0]
    stock = run_stock(job, replicas=2)
    stock.metrics = spread.metrics
    assert_same(spread, stock, 1e-10)


def test_bf16(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), dtype="float32", arguments={"bf16": True})
    ours, stock = ranks.run(run_fold3d, 2, job, FOLDED)[0], run_stock(job)
    full = run_stock(Job(str(tmp_path), dtype="float32"))
    assert_same(ours, stock, 1e-5)
    assert ours.column("loss") != full.column("loss")  # autocast was on


class Draws(Variant):
    """What the global generators give after training: they decide the order of the data."""

    def after(self, trainer: Any) -> Any:
        return torch.rand(3).tolist()


def test_dropout_leaves_the_global_generator_alone(ranks: RankPool, tmp_path: Path) -> None:
    ours = ranks.run(run_fold3d, 2, Job(str(tmp_path), dropout=0.2, variant=Draws()), FOLDED)
    stock = run_stock(Job(str(tmp_path), variant=Draws()))
    assert ours[0].extra == ours[1].extra == stock.extra
    assert ours[0].column("loss") != stock.column("loss")


def test_meta_model_is_the_same_under_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    whole = Job(str(tmp_path), on_meta=True, arguments={"gradient_accumulation_steps": 4}, samples=32)
    spread = Job(str(tmp_path), on_meta=True, samples=32)
    alone = ranks.run(run_fold3d, 1, whole, {})[0]
    folded = ranks.run(run_fold3d, 4, spread, {"dp": 2, "pp": 2, "segments": 2})[0]
    folded.metrics = alone.metrics
    assert_same(folded, alone, 1e-10)


def test_meta_model_with_pretrained_weights(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"))
    model_of(job).save_pretrained(tmp_path / "pretrained")
    layout = FOLDED | {"weights": str(tmp_path / "pretrained")}
    ours = ranks.run(run_fold3d, 2, Job(str(tmp_path / "run"), on_meta=True), layout)[0]
    assert_same(ours, run_stock(job), 1e-10)


def test_timeline(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(run_fold3d, 4, Job(str(tmp_path)), {"dp": 2, "pp": 2, "timeline": 2})
    assert sorted(p.name for p in (tmp_path / "timeline").iterdir()) == ["step-2.json", "step-2.png"]
    events = json.loads((tmp_path / "timeline" / "step-2.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert (tmp_path / "timeline" / "step-2.png").read_bytes()[:4] == b"\x89PNG"


def test_timeline_of_shards(ranks: RankPool, tmp_path: Path) -> None:
    """Of the first step, too, in which the engine is built."""
    ranks.run(run_fold3d, 2, Job(str(tmp_path)), {"tp": 2, "tp_overlap": "sub", "timeline": 1})
    trace = json.loads((tmp_path / "timeline" / "step-1.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in (0, 1):
        mine = [event for event in spans if event["pid"] == rank]
        sums = [event for event in mine if event["cat"] == "tp_sync"]
        waits = sum(event["dur"] for event in mine if event["name"] == "TP_SYNC") / 1e3
        assert len(sums) > 8 and sum(event["args"]["bytes"] for event in sums) > 0
        breakdown = trace["otherData"]["breakdowns"][str(rank)]
        assert breakdown["tp_exposed_ms"] == pytest.approx(waits, abs=0.2)


class Answering(models.PlainModel):
    """A plain module that returns what the stock Trainer expects: a mapping with loss and logits."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        return {"loss": super().forward(input_ids, labels, attention_mask)}


class Plain(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(3)
        return named | {"model": Answering(tied=True).double()}

    def after(self, trainer: Any) -> Any:
        if hasattr(trainer, "engine"):
            trainer.save_model()


def test_plain_module(ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"per_device_train_batch_size": 4}
    against_stock(ranks, tmp_path, Plain(), arguments=arguments)
    assert (tmp_path / "model.safetensors").is_file()


class Scoring(nn.Module):
    """Has no loss of its own, and an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(models.VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, input_ids: Tensor, names: list[str]) -> Tensor:
        x = self.word(input_ids)
        for _, layer in zip(names, self.layers, strict=True):
            x = layer(x).tanh()
        return x @ self.word.weight.T


def collate_with_names(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = collate(samples)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "names": list("abcd")}


class LossOutside(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(3)
        return named | {"model": Scoring().double(), "data_collator": collate_with_names}

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
                labels = inputs.pop("labels")
                scores = model(**inputs)
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
                return (loss, {"loss": loss, "logits": scores}) if return_outputs else loss

        Trainer.loss_is_scaled_for_ga = False
        return Trainer


def test_plain_module_without_loss_and_with_values_that_are_no_tensors(ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"per_device_train_batch_size": 4, "label_names": ["labels"]}
    against_stock(ranks, tmp_path, LossOutside(), arguments=arguments)


def test_parameters_frozen_by_the_user(ranks: RankPool, tmp_path: Path) -> None:
    against_stock(ranks, tmp_path, Frozen(), arguments={"save_strategy": "steps", "save_steps": 2})


class Frozen(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        for name, parameter in named["model"].named_parameters():
            parameter.requires_grad_(".1." not in name and "wpe" not in name)
        return named


class Augmented(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples changed at random in the loader's workers; stages of a replica must see the same ones."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = rows(32)[index]
        flip = torch.randint(2, models.VOCABULARY, row["input_ids"].shape)
        return row | {"input_ids": torch.where(torch.rand(flip.shape) < 0.3, flip, row["input_ids"])}


class Masked(Augmented):
    """The same from the other generators that the stock Trainer seeds."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = rows(32)[index]
        words = [random.randrange(models.VOCABULARY) if np.random.random() < 0.3 else int(w) for w in row["input_ids"]]
        return row | {"input_ids": torch.tensor(words)}


class Masks(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"train_dataset": Masked()}


def test_planning_draws_no_random_numbers(ranks: RankPool, tmp_path: Path) -> None:
    """Samples are read to time the model's layers with, before the first step."""
    job = Job(str(tmp_path), variant=Masks())
    ours = ranks.run(run_fold3d, 2, job, {"pp": 2, "segments": "auto"}, timeout=120.0)
    assert_same(ours[0], run_stock(job), 1e-10)
    assert_same(ours[1], ours[0], 0.0)


class Augments(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"train_dataset": Augmented()}


def run_with_workers(job: Job, layout: dict[str, Any]) -> Any:
    """Runs the job in a pool process, which as a daemon may not start loader workers otherwise."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    try:
        return run_fold3d(job, layout)
    finally:
        config["daemon"] = True


def test_workers_give_all_stages_the_same_samples(ranks: RankPool, tmp_path: Path) -> None:
    # A pool process would start them with spawn, like itself, and import torch again for each.
    arguments = {"dataloader_num_workers": 1, "max_steps": 2, "dataloader_multiprocessing_context": "fork"}
    job = Job(str(tmp_path), arguments=arguments, variant=Augments())
    ours = ranks.run(run_with_workers, 2, job, FOLDED)
    assert_same(ours[0], run_stock(job), 1e-10)
    assert_same(ours[1], ours[0], 0.0)


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance", "sequential"])
def test_sampling_strategies(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    """Against the stock Trainer on as many processes as there are replicas."""
    job = Job(str(tmp_path), arguments={"train_sampling_strategy": strategy}, samples=32)
    ours = ranks.run(run_fold3d, 4, job, {"dp": 2, "pp": 2})[0]
    assert_same(ours, ranks.run(run_stock, 2, job)[0], 1e-10)


def test_group_size_larger_than_the_last_step(ranks: RankPool, tmp_path: Path) -> None:
    """An epoch of 5 micro-batches in steps of 4: the last step has fewer than the group size."""
    arguments = {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 1}
    job = Job(str(tmp_path), arguments=arguments, samples=10)
    layout = {"pp": 2, "segments": 2, "schedule": "fold", "group_size": 3}
    assert_same(ranks.run(run_fold3d, 2, job, layout)[0], run_stock(job), 1e-10)


@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_input_token_count_and_flops(ranks: RankPool, tmp_path: Path, layout: dict[str, int]) -> None:
    arguments = {"include_num_input_tokens_seen": "non_padding"}
    job = Job(str(tmp_path), arguments=arguments, samples=32, variant=Counts())
    ours = ranks.run(run_fold3d, 4, job, layout)
    assert {outcome.extra for outcome in ours} == {run_stock(job, replicas=layout.get("dp", 1)).extra}


class Counts(Variant):
    def after(self, trainer: Any) -> Any:
        return trainer.state.num_input_tokens_seen, trainer.state.total_flos


def test_noise_on_embeddings(ranks: RankPool, tmp_path: Path) -> None:
    """NEFTune hooks the embedding, which only the first stage has; the noise does not depend on the layout."""
    job = Job(str(tmp_path), arguments={"neftune_noise_alpha": 5.0})
    folded, alone = ranks.run(run_fold3d, 2, job, FOLDED)[0], ranks.run(run_fold3d, 1, job, {})[0]
    assert_same(folded, alone, 1e-10)
    assert folded.column("loss") != run_stock(Job(str(tmp_path))).column("loss")


# What is refused


def trainer(**named: Any) -> fold3d.Trainer:
    args = fold3d.TrainingArguments(output_dir="unused", use_cpu=True, **named.pop("arguments", {}))
    given = {"model": model_of(Job("unused")), "args": args, "train_dataset": rows(4), "data_collator": collate}
    return fold3d.Trainer(**(given | named))


def test_refused_constructions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Trainer needs a model"):
        trainer(model=None)
    with pytest.raises(ConfigError, match="import TrainingArguments from fold3d too"):
        trainer(args=transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ConfigError, match=r"weights='somewhere' has no effect"):
        trainer(arguments={"weights": "somewhere"})
    foreign = torch.optim.SGD(model_of(Job("unused")).parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="not the model's"):
        trainer(optimizers=(foreign, None))
    with pytest.raises(ConfigError, match=r'backend="ray" runs trials in processes of its own'):
        trainer().hyperparameter_search(backend="ray")
    with pytest.raises(ConfigError, match="timeline=9 has no effect: training has 1 steps"):
        trainer(arguments={"timeline": 9, "num_train_epochs": 1}).train()
