"""Overrides: the Trainer's methods that a user's class replaces, which may read what is not complete yet."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import transformers

from fold3d.errors import ConfigError
from fold3d.trainer.events import may_read_gradients

logger = logging.getLogger(__name__)

_READ_WEIGHTS = {"state_dict", "parameters", "named_parameters", "save_pretrained"}


METHODS = frozenset(
    name
    for name in dir(transformers.Trainer)
    if not name.startswith("__") and callable(getattr(transformers.Trainer, name))
)
"""Of the stock Trainer."""


def overridden(trainer: transformers.Trainer) -> list[str]:
    """Returns the names of the stock Trainer's methods that are overridden."""
    return [name for name in sorted(METHODS) if is_overridden(trainer, name)]


def is_overridden(trainer: transformers.Trainer, name: str) -> bool:
    """Returns whether a class neither transformers' nor fold3d's replaces this method of the stock Trainer, or the user
    has set another one on the object; what fold3d puts there is around such a method."""
    owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
    return name in vars(trainer) or (owner is not None and not _is_ours(owner))


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("transformers", "fold3d", "builtins")


def refuse_savers(trainer: transformers.Trainer) -> None:
    """Raises ConfigError for an override that seems to read weights which this process may not have in a save.

    A save would say so, too, but hours later. By the names that its code uses.
    """
    args: Any = trainer.args
    if args.pp * args.tp == 1 or not getattr(trainer, "reads_weights", True):
        return
    for name in ("save_model", "_save_checkpoint"):
        own = vars(trainer).get(name)
        found = [(type(trainer), own)] if own is not None else []
        found += [(kind, vars(kind).get(name)) for kind in type(trainer).__mro__ if not _is_ours(kind)]
        for kind, method in found:
            code = getattr(inspect.unwrap(method or print), "__code__", None)
            used = sorted(_READ_WEIGHTS & set(code.co_names)) if code is not None else []
            if used:
                raise ConfigError(
                    f"{kind.__name__}.{name} uses {used[0]}, and with pp={args.pp} and tp={args.tp} a process has a "
                    "part of the weights: override _save(output_dir, state_dict) instead, which process 0 calls with "
                    f"the whole state_dict, or set pp=1 and tp=1. If {name} reads no weights, set the class attribute "
                    "reads_weights = False"
                )


class TrainingStepError(ConfigError):
    """An overridden `training_step` has not called fold3d's, or several times."""

    is_everywhere = False  # one that calls it now and then may call it on other ranks


def require_super(trainer: transformers.Trainer, calls: Callable[[], int]) -> None:
    """An overridden `training_step` that computes by itself ends the training in its first call, where that cannot be;
    so does one that calls fold3d's more than once.

    Args:
        calls: how often fold3d's own has been called.
    """
    args: Any = trainer.args
    if not is_overridden(trainer, "training_step"):
        return
    is_alone = args.world_size == 1
    users = trainer.training_step
    code = getattr(inspect.unwrap(users), "__code__", None)
    may_call = "training_step" in getattr(code, "co_names", ())

    def refusal() -> TrainingStepError:
        return TrainingStepError(
            f"{type(trainer).__name__}.training_step is overridden and does not call super().training_step, where "
            f"dp={args.dp}, pp={args.pp} and tp={args.tp} do their part of the step: call it and change its inputs, or "
            "what compute_loss makes of them; with one process it may compute by itself"
        )

    def called_again() -> TrainingStepError:
        return TrainingStepError(
            f"{type(trainer).__name__}.training_step calls super().training_step several times for one micro-batch, "
            "and fold3d runs all micro-batches of a step together, when it has the last: there are no gradients in "
            "between. Compute both losses in compute_loss, on one batch of both inputs"
        )

    @functools.wraps(users)
    def call(*args: Any, **named: Any) -> Any:
        before = calls()
        try:
            result = users(*args, **named)
        except Exception as error:  # it met weights of other processes
            if calls() > before + 1:
                raise called_again() from error
            if calls() == before and not may_call and not is_alone:
                raise refusal() from error
            raise
        if calls() == before and not is_alone:
            raise refusal()
        if calls() > before + 1:
            raise called_again()
        return result

    vars(trainer)["training_step"] = call


def gradient_readers(trainer: transformers.Trainer, hooks: bool) -> list[str]:
    """Returns what may read or change gradients before, or after, the optimizer's step, by name.

    Args:
        hooks: whether the user has hooks at the optimizer's step.
    """
    readers = [
        f"{type(callback).__name__}.{event}"
        for callback in trainer.callback_handler.callbacks
        for event in ("on_pre_optimizer_step", "on_optimizer_step")
        if may_read_gradients(callback, event)
    ]
    if getattr(trainer, "reads_gradients", True):
        methods = ("training_step", "_clip_grad_norm", "_get_grad_norm")
        readers += [f"{type(trainer).__name__}.{name}" for name in methods if name in overridden(trainer)]
        readers += ["a hook of the optimizer's step"] if hooks else []
    return readers


def wait_before(trainer: transformers.Trainer, names: Iterable[str], wait: Callable[[], None]) -> None:
    """Has those of the methods `names` of `trainer` that are overridden run behind `wait`: they may change weights."""

    def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            wait()
            return method(*args, **named)

        return call

    for name in names:
        if name != "compute_loss" and is_overridden(trainer, name):  # which runs within a step
            vars(trainer)[name] = waiting(getattr(trainer, name))
