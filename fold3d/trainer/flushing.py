"""FlushCallback: whoever reads weights in a callback gets them complete."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from fold3d.runtime.engine import Engine

logger = logging.getLogger(__name__)

_EVERY_STEP = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end")
_OTHERS = (
    *("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_evaluate", "on_predict", "on_save", "on_log"),
    "on_prediction_step",
)


class FlushCallback(TrainerCallback):
    """Runs before all other callbacks and brings the parameters up to date where one of them may read them.

    After a step a layer's parameters are complete only when its next forward begins. The stock callbacks read none. One
    of the user's that implements an event may: it finds them complete, at the price of waiting for them there. A
    callback that reads no weights says so with `reads_weights = False` and costs nothing.
    """

    def __init__(self, engine: Engine, handler: CallbackHandler):
        self._engine = engine
        self._handler = handler
        self._told: set[str] = set()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The weights are final."""
        self._engine.flush()

    def _before(self, event: str) -> None:
        readers = [type(c).__name__ for c in self._handler.callbacks if _may_read(c, event)]
        if not readers:
            return
        if event in _EVERY_STEP and self._engine.topology.dp > 1:
            for name in set(readers) - self._told:
                logger.warning(
                    "%s.%s may read weights, so every step waits for them before it; if it reads none, set the class "
                    "attribute reads_weights = False",
                    name,
                    event,
                )
            self._told.update(readers)
        self._engine.flush()


def _event(name: str) -> Callable[..., None]:
    def before(self: FlushCallback, *_: Any, **__: Any) -> None:
        self._before(name)

    before.__name__ = name
    before.__doc__ = "Brings the parameters up to date if another callback may read them."
    return before


for _name in (*_EVERY_STEP, *_OTHERS):
    setattr(FlushCallback, _name, _event(_name))


def _may_read(callback: TrainerCallback, event: str) -> bool:
    kind = type(callback)
    if kind.__module__.split(".")[0] in ("transformers", "fold3d") or not getattr(callback, "reads_weights", True):
        return False
    return getattr(kind, event, None) is not getattr(TrainerCallback, event, None)
