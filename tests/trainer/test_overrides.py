"""Methods of the Trainer that a user's class replaces: what they cannot do with a cut model is said by name."""

from __future__ import annotations

from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fold3d
from fold3d.errors import ConfigError, Fold3dError
from fold3d.trainer.events import implements, may_read_gradients
from fold3d.trainer.overrides import overridden, refuse_savers
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job
from tests.trainer.user_jobs import build

SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}


class SavesPart(fold3d.Trainer):
    """Saves a part of the model, as LLaVA's projector."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        state = self.model.state_dict() if state_dict is None else state_dict
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        part = {name: tensor.detach().clone() for name, tensor in state.items() if "ln_f" in name or "h.0" in name}
        torch.save(part, f"{output_dir}/part.bin")
        super()._save(output_dir)


class SavesBesides(fold3d.Trainer):
    """Reads the model where it is given what it needs."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        torch.save({name: p.detach().clone() for name, p in self.model.named_parameters()}, f"{output_dir}.bin")


def save(job: Job, layout: dict[str, Any], kind: type[Any]) -> dict[str, Any] | str:
    """Returns the weights at the end, or the error."""
    trainer = build(job, layout, kind)
    try:
        trainer.train()
        trainer.save_model(str(Path(job.folder) / "end"))
        whole = trainer.engine.state_dict()["model"]
        trainer.engine.close()
        return dict(whole)
    except Fold3dError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}, {"tp": 2}], ids=str)
def test_an_own_save_gets_the_whole_state(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """The first checkpoint, save_steps after the beginning, ended in MissingWeightsError."""
    whole = ranks.run(save, 2, Job(str(tmp_path), arguments=SAVES), layout, SavesPart)[0]
    assert isinstance(whole, dict), whole
    part, file = torch.load(tmp_path / "end/part.bin"), load_file(tmp_path / "end/model.safetensors")
    assert len(part) == 14 and (tmp_path / "checkpoint-2/part.bin").is_file()
    for name, tensor in [*part.items(), *file.items()]:
        assert tensor.equal(whole[name]), name


def test_an_own_save_that_reads_the_model(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(save, 2, Job(str(tmp_path), arguments=SAVES), {"pp": 2}, SavesBesides):
        assert "SavesBesides._save reads weights of the model" in text and "its argument state_dict" in text


class OwnSaveModel(fold3d.Trainer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        self.model.save_pretrained(output_dir)


class OwnCheckpoint(fold3d.Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        torch.save({name: p for name, p in model.named_parameters() if "head" in name}, "head.bin")


class Card(fold3d.Trainer):
    """As TRL's: a file more."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.create_model_card()
        super()._save_checkpoint(model, trial)


class Promises(OwnCheckpoint):
    reads_weights = False


@pytest.mark.parametrize(
    ("kind", "word"),
    [(OwnSaveModel, "save_pretrained"), (OwnCheckpoint, "named_parameters"), (Card, ""), (Promises, "")],
)
def test_other_savers_that_read_weights_are_refused_before_training(kind: type[Any], word: str) -> None:
    def check(**layout: int) -> None:
        trainer = object.__new__(kind)
        trainer.args = SimpleNamespace(**({"pp": 1, "tp": 1} | layout))
        refuse_savers(trainer)

    check()
    if not word:
        check(pp=2)
        return
    for layout in ({"pp": 2}, {"tp": 2}):
        with pytest.raises(ConfigError, match=rf"{word}, and with .* override _save\(output_dir, state_dict\) instead"):
            check(**layout)


class OwnStep(fold3d.Trainer):
    """Computes by itself, as for adversarial training."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        loss.backward()
        return loss.detach()


class NowAndThen(fold3d.Trainer):
    """Leaves out a micro-batch on one process."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.args.process_index == 1 and self.state.global_step == 1:
            return torch.zeros(())
        return super().training_step(model, inputs, num_items_in_batch)


class Around(fold3d.Trainer):
    """Does something beside the step, and has errors of its own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.state.global_step == 2:
            raise KeyError("of the user")
        return super().training_step(model, inputs, num_items_in_batch)


class Twice(fold3d.Trainer):
    """Steps on each batch, and once more on another one made of it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, dict(inputs), num_items_in_batch)
        return loss + super().training_step(model, inputs, num_items_in_batch)


def error_of(job: Job, layout: dict[str, Any], kind: type[Any]) -> str:
    """Returns the error of a training."""
    try:
        trainer = build(job, layout, kind)
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    trainer.engine.close()
    return "none"


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}], ids=str)
def test_a_training_step_without_super(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """It ended in MissingWeightsError here and in an error of meta tensors there."""
    job = Job(str(tmp_path))
    for text in ranks.run(error_of, 2, job, layout, OwnStep):
        assert text.startswith(
            "TrainingStepError: OwnStep.training_step is overridden and does not call super().training_step"
        )
    found = ranks.run(error_of, 2, job, layout, NowAndThen)
    assert all("NowAndThen.training_step is overridden and does not call super()" in text for text in found), found
    assert ranks.run(error_of, 2, job, layout, Around) == ["KeyError: 'of the user'"] * 2
    assert ranks.run(error_of, 1, job, {}, OwnStep) == ["none"]
    for processes, of in ((2, layout), (1, {})):  # the last micro-batch of a step was left for the next
        for text in ranks.run(error_of, processes, job, of, Twice):
            assert text.startswith("TrainingStepError: Twice.training_step calls super().training_step several times")


class ReadsOnOne(transformers.TrainerCallback):  # type: ignore[misc]
    """Saves the model by itself, on process 0."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if args.process_index == 0 and state.global_step == 1:
            torch.save(named["model"].state_dict(), f"{args.output_dir}.bin")


class Reading(fold3d.Trainer):
    def __init__(self, **named: Any) -> None:
        super().__init__(**named, callbacks=[ReadsOnOne()])


def test_weights_that_one_process_misses_are_told_to_the_others(ranks: RankPool, tmp_path: Path) -> None:
    """They said that the job's store is gone."""
    first, second = ranks.run(error_of, 2, Job(str(tmp_path)), {"pp": 2}, Reading)
    assert first.startswith("MissingWeightsError: ")
    assert second.startswith("RankError: ") and "rank 0 (replica 0, stage 0) failed" in second
    assert "MissingWeightsError: " in second and "trainer.save_model()" in second


def weighed_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
    """Reads weights besides the model's call."""
    with torch.no_grad():
        weight = float(sum(p.norm() for name, p in self.model.named_parameters() if "ln_f" in name or "wte" in name))
    loss = fold3d.Trainer.compute_loss(self, model, inputs, return_outputs=False, **named) * (1 + weight / 100)
    return (loss, {}) if return_outputs else loss


class Weighs(fold3d.Trainer):
    compute_loss = weighed_loss


def weighed(job: Job, layout: dict[str, Any], on_object: bool) -> list[float]:
    trainer = build(job, layout, fold3d.Trainer if on_object else Weighs)
    assert overridden(trainer) == ([] if on_object else ["compute_loss"])
    if on_object:
        trainer.compute_loss = MethodType(weighed_loss, trainer)
        assert overridden(trainer) == ["compute_loss"]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if on_object:
        del trainer.compute_loss
        assert overridden(trainer) == []
    trainer.engine.close()
    return losses


@pytest.mark.gate
def test_a_method_that_is_set_on_the_object_is_treated_like_one_of_a_class(ranks: RankPool, tmp_path: Path) -> None:
    """It read weights that were not complete."""
    job = Job(str(tmp_path), arguments={"logging_strategy": "steps", "logging_steps": 1, "max_steps": 4})
    layout = {"dp": 2, "dp_sync": "zero1"}
    expected = ranks.run(weighed, 2, job, layout, False)
    assert ranks.run(weighed, 2, job, layout, True) == expected and len(expected[0]) == 4


def test_an_event_that_is_set_on_the_callback_is_the_users() -> None:
    callback = transformers.TrainerCallback()
    assert not implements(callback, "on_step_end")
    callback.on_step_end = lambda *_, **__: None  # type: ignore[method-assign]
    assert implements(callback, "on_step_end") and may_read_gradients(callback, "on_step_end")
