"""trainer_class and arguments_class: trainers that other libraries derive from the stock one, on fold3d."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import transformers

from fold3d.errors import ConfigError
from fold3d.trainer.arguments import TrainingArguments
from fold3d.trainer.trainer import Trainer


@functools.cache
def trainer_class(base: type[transformers.Trainer]) -> type[Any]:
    """Returns a class like `base` that derives from `fold3d.Trainer` in the place of `transformers.Trainer`.

    Its constructor takes the arguments of `base`; `args` must be of `arguments_class(...)` of the library's class of
    arguments. Methods that `base` overrides, it overrides in fold3d's Trainer.

    Args:
        base: a class derived from transformers.Trainer, such as trl.SFTTrainer.
    Raises: ConfigError for anything else.
    """
    made: type[Any] = _derived(base, transformers.Trainer, Trainer, "trainer_class")
    return made


@functools.cache
def arguments_class(base: type[transformers.TrainingArguments]) -> type[Any]:
    """Returns a dataclass with the fields and defaults of `base` and fold3d's settings (`dp`, `pp`, `tp` ...).

    Args:
        base: a dataclass derived from transformers.TrainingArguments, such as trl.SFTConfig.
    Raises: ConfigError for anything else.
    """
    made: type[Any] = _derived(base, transformers.TrainingArguments, TrainingArguments, "arguments_class")
    if made in (base, TrainingArguments):
        return made
    setattr(made, "__reduce__", lambda self: (_new_arguments, (base,), vars(self)))  # noqa: B010 (in checkpoints)
    return dataclass(repr=False)(made)


def _derived(base: Any, stock: type[Any], ours: type[Any], function: str) -> Any:
    if not isinstance(base, type) or not issubclass(base, stock):
        raise ConfigError(f"fold3d.{function}({base!r}): must be a class derived from transformers.{stock.__name__}")
    if issubclass(base, ours):
        return base
    if issubclass(ours, base):
        return ours
    return type(base.__name__, (base, ours), {"__module__": base.__module__, "__doc__": base.__doc__})


def _new_arguments(base: Any) -> Any:
    return object.__new__(arguments_class(base))


Seq2SeqTrainer = trainer_class(transformers.Seq2SeqTrainer)
"""`trainer_class(transformers.Seq2SeqTrainer)`."""
Seq2SeqTrainingArguments = arguments_class(transformers.Seq2SeqTrainingArguments)
"""`arguments_class(transformers.Seq2SeqTrainingArguments)`."""
