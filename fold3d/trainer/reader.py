"""Who reads the arguments: fold3d's Trainer, or transformers' own, which would ignore the layout in silence."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

import transformers

from fold3d.errors import ConfigError

_building: ContextVar[bool] = ContextVar("fold3d_trainer_is_being_built", default=False)


@contextlib.contextmanager
def building_trainer() -> Iterator[None]:
    """In its body the stock constructor works for a `fold3d.Trainer`."""
    token = _building.set(True)
    try:
        yield
    finally:
        _building.reset(token)


def refuse_stock_trainer() -> None:
    """Called by what the stock constructor asks the arguments before it touches the model.

    Raises: ConfigError when a Trainer asks that is not fold3d's. Anybody else may look.
    """
    reader = sys._getframe(2)
    trainer = reader.f_locals.get("self")
    is_trainer = isinstance(trainer, transformers.Trainer)
    if _building.get() or not (is_trainer or reader.f_globals.get("__name__", "").startswith("transformers.")):
        return
    maker = reader.f_back
    if maker is not None and maker.f_globals.get("__name__", "").startswith("transformers.integrations"):
        return  # W&B and DVCLive make a Trainer to save the model with, which never trains
    name = type(trainer).__name__ if is_trainer else "Trainer"
    of_its_own = "" if name == "Trainer" else f", and derive {name} from it, or take fold3d.trainer_class({name})"
    raise ConfigError(
        f"{name} is transformers' own Trainer or derived from it, but args are fold3d.TrainingArguments: it would "
        "ignore dp, pp and every other setting of fold3d and train the whole model in each process; import Trainer "
        f"from fold3d, too (from fold3d import Trainer, TrainingArguments){of_its_own}. Without fold3d, take "
        "TrainingArguments from transformers"
    )
