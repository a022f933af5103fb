"""What users do with gradients between the backward pass and the optimizer, with the stock Trainer and fold3d's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import Module, Parameter

import fold3d
from tests.dist import dp_sync_waits as waits
from tests.trainer.jobs import Job, Variant, collate, rows, stock_arguments, trainer_arguments


def present(model: Module) -> Iterator[tuple[str, Parameter]]:
    """Yields the parameters that have a gradient here."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter


def noise(name: str, step: int, like: Tensor) -> Tensor:
    """Returns noise that depends on the parameter and the step, not on who draws it."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype) * 1e-3


class Changes(transformers.TrainerCallback):  # type: ignore[misc]
    """Changes gradients in every way: in place, by value, by replacing, zeroing and taking them away."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.after: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        self.seen.append({name: float(parameter.grad.norm()) for name, parameter in present(model)})
        torch.nn.utils.clip_grad_value_(model.parameters(), 2e-3)
        for name, parameter in present(model):
            assert parameter.grad is not None
            parameter.grad.add_(noise(name, state.global_step, parameter.grad))
            if name.endswith("c_fc.weight"):
                parameter.grad = parameter.grad * 0.5
            elif name.endswith("c_attn.bias"):
                parameter.grad.zero_()
            elif name.endswith("ln_2.weight") and state.global_step % 2:
                parameter.grad = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        self.after.append({name: float(parameter.grad.norm()) for name, parameter in present(model)})


class Changed(Variant):
    """A Trainer that clips values before the stock norm clipping, and a callback that changes the rest."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        self.callback = Changes()
        return named | {"callbacks": [self.callback]}

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def training_step(self, model: Any, *args: Any, **named: Any) -> Any:
                loss = super().training_step(model, *args, **named)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_value_(model.parameters(), 4e-3)
                return loss

        return Trainer

    def after(self, trainer: Any) -> Any:
        return self.callback.seen, self.callback.after


class Clips(Variant):
    """Clips by the accelerator, in a callback or in place of the stock method; of some parameters, where it is asked
    to."""

    def __init__(self, where: str, some: bool = False) -> None:
        self.where, self.some = where, some

    def trainer(self, base: type[Any]) -> type[Any]:
        self.norms: list[float] = []
        made = self

        def clip(trainer: Any, model: Any) -> Any:
            parameters = list(model.parameters())
            norm = trainer.accelerator.clip_grad_norm_(parameters[:3] if made.some else parameters, 0.02)
            made.norms.append(float(norm))
            return norm

        class Clip(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
                if made.where == "callback":
                    clip(self.trainer, model)

        class Trainer(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **named: Any) -> None:
                super().__init__(*args, **named)
                callback = Clip()
                callback.trainer = self
                self.add_callback(callback)

            def _clip_grad_norm(self, model: Any) -> Any:
                return clip(self, model) if made.where == "method" else super()._clip_grad_norm(model)

        return Trainer

    def after(self, trainer: Any) -> Any:
        return self.norms


class Sequential(Variant):
    """Noise from one generator, drawn in the order of the parameters: the copies of tied weights get other noise."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [Draws()]}

    def after(self, trainer: Any) -> Any:
        weights = {
            name: parameter for name, parameter in trainer.model.named_parameters() if parameter.device.type != "meta"
        }
        found = [value.detach().clone() for name, value in weights.items() if "wte" in name or "lm_head" in name]
        return found[0]


class Draws(transformers.TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        generator = torch.Generator().manual_seed(state.global_step)
        for _, parameter in present(model):
            assert parameter.grad is not None
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


class Denies(Changes):
    """Says that it reads none, and does."""

    reads_gradients = False


class Denied(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [Denies()]}


class Counts(Variant):
    """How often the step's gradients were whole; a callback of one process is enough."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def train(self, *args: Any, **named: Any) -> Any:
                self.asked: list[bool] = []
                if self.args.process_index == 1:
                    self.add_callback(Looks())
                run = self.engine.run

                def counting(*inner: Any, **keywords: Any) -> Any:
                    self.asked.append(keywords["reads_gradients"])
                    return run(*inner, **keywords)

                self.engine.run = counting
                return super().train(*args, **named)

        return Trainer

    def after(self, trainer: Any) -> Any:
        return trainer.asked


class Looks(transformers.TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        assert all(bool(torch.isfinite(parameter.grad).all()) for _, parameter in present(model))


def own_loop(dp_sync: str, reads: bool) -> tuple[list[str], dict[str, Tensor]]:
    """Returns weights after steps with clipped values in a loop of one's own, or the errors of touching gradients."""
    engine = waits.engine_of(dp=2, dp_sync=dp_sync)
    optimizer = engine.optimizer
    assert optimizer is not None
    errors: list[str] = []
    for step in range(3):
        batch = waits.batch_of(step, engine.topology.dp_rank)
        engine.run([batch], lambda model, part: model(**part), reads_gradients=reads)
        if reads:
            torch.nn.utils.clip_grad_value_(engine.model.parameters(), 1e-2)
            engine.clip_grad_norm(1e-2)
        else:
            errors += touched(engine.model)
        optimizer.step()
        if not reads:
            errors += touched(engine.model)[:1]
            optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()
    engine.flush()
    weights = {name: parameter.detach().clone() for name, parameter in engine.owned.items()}
    engine.close()
    return errors, weights


def touched(model: Module) -> list[str]:
    """Returns the errors of reading and changing gradients in four ways."""
    parameter = next(model.parameters())
    gradient = parameter.grad
    assert gradient is not None and gradient.shape == parameter.shape
    return [
        waits.error_of(gradient.norm),
        waits.error_of(lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)),
        waits.error_of(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)),
        waits.error_of(lambda: gradient.data.mul_(2)),
    ]


def stock_loop() -> dict[str, Tensor]:
    """Returns the weights of `own_loop(reads=True)` as one process computes them."""
    model = waits.Net().double()
    optimizer = waits.sgd(list(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        for replica in range(2):
            (model(**waits.batch_of(step, replica)) / 2).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def step_by_hand(job: Job, layout: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss and this rank's gradients of a training_step before train()."""
    args = fold3d.TrainingArguments(**stock_arguments(job), **layout)
    trainer = fold3d.Trainer(args=args, **trainer_arguments(job))
    loss = trainer.training_step(trainer.model, collate(rows(2))).item()
    gradients = {name: parameter.grad for name, parameter in present(trainer.model) if parameter.grad is not None}
    trainer.engine.close()
    return loss, gradients
