"""A script on one process that catches Ctrl-C goes on as with the stock Trainer: it saves, evaluates, trains again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fold3d
from tests.helpers.data import dataset
from tests.helpers.models import build, gpt2_config

STEPS = 4


class Press(transformers.TrainerCallback):
    """Presses Ctrl-C when so many steps are done."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the Trainer."""
        if state.global_step == self.after:
            signal.raise_signal(signal.SIGINT)


def trainer_of(folder: Path, steps: int, *callbacks: transformers.TrainerCallback) -> fold3d.Trainer:
    """Returns a Trainer of the same model and data each time."""
    transformers.set_seed(0)
    args = fold3d.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    return fold3d.Trainer(
        model=build(gpt2_config()), args=args, train_dataset=dataset(32, 8), callbacks=list(callbacks)
    )


def weights(trainer: fold3d.Trainer) -> dict[str, Tensor]:
    """Returns copies of the model's parameters."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.fixture(autouse=True)
def at_a_terminal() -> Iterator[None]:
    """A shell starts what runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("where", ["callback", "forward", "backward"])
def test_what_a_script_catches(tmp_path: Path, where: str) -> None:
    expected = trainer_of(tmp_path / "a", STEPS)
    expected.train()
    after = STEPS if where == "callback" else STEPS + 9
    trainer = trainer_of(tmp_path / "b", STEPS + 3, Press(after))
    layer = next(m for m in trainer.model.modules() if isinstance(m, torch.nn.LayerNorm))

    def press(*_: Any) -> None:
        if trainer.state.global_step == STEPS:
            signal.raise_signal(signal.SIGINT)

    if where == "forward":
        handle = layer.register_forward_pre_hook(press)
    if where == "backward":
        handle = layer.register_full_backward_hook(press)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    for name, one in weights(expected).items():
        assert torch.equal(one, weights(trainer)[name]), name
    if where != "callback":
        handle.remove()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size > 0
    trainer.remove_callback(Press)
    assert trainer.train().global_step == STEPS + 3
