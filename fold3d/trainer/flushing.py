"""FlushingHandler: whoever reads weights in a callback gets them complete."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from fold3d.engine.engine import Engine
from fold3d.errors import ConfigError
from fold3d.trainer.control import ControlFlags

logger = logging.getLogger(__name__)

_EVERY_STEP = ("on_step_begin", "on_optimizer_step", "on_substep_end", "on_step_end")
"""Not on_pre_optimizer_step: after a backward pass there is nothing to wait for."""


class FlushingHandler(CallbackHandler):
    """The stock handler, which brings the parameters up to date before an event where a callback may read them.

    After a step a layer's parameters are complete only when its next forward begins. The stock callbacks read none. One
    of the user's that implements an event may: it finds them complete, at the price of waiting for them there. A
    callback that reads no weights says so with `reads_weights = False` and costs nothing.

    What callbacks set of `control` on one process is set on all, see `ControlFlags`.
    """

    engine: Engine
    flags: ControlFlags
    has_stepped: Event
    """Set once the optimizer is about to step."""
    _told: set[str]
    save_is_under_way: Callable[[], bool]
    """Whether the checkpoint of the step that has just ended is not complete yet."""
    flush: Callable[[], None]
    before_update: Callable[[], None]
    load: Callable[[bool], None]

    @classmethod
    def adopt(
        cls,
        handler: CallbackHandler,
        engine: Engine,
        has_stepped: Event,
        save_is_under_way: Callable[[], bool],
        *,
        flush: Callable[[], None],
        before_update: Callable[[], None],
        load: Callable[[bool], None],
    ) -> None:
        """Turns the stock Trainer's `handler` into one that flushes; its list of callbacks is the user's.

        Args:
            flush: is called before somebody may read or change weights.
            before_update: is called before the optimizer steps.
            load: is called when a training begins; whether a callback of this process may read or change what it
                begins with.
        """
        handler.__class__ = cls
        assert isinstance(handler, cls)
        handler.engine, handler.has_stepped, handler._told = engine, has_stepped, set()
        handler.flags = ControlFlags(engine)
        handler.save_is_under_way = save_is_under_way
        handler.flush, handler.before_update, handler.load = flush, before_update, load

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        """Calls the callbacks, unless there is no checkpoint yet that they could look at."""
        control.should_save = False
        return control if self.save_is_under_way() else super().on_save(args, state, control, **named)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        """Calls the callbacks, once the parameters are what they read."""
        if event == "on_pre_optimizer_step":
            self.has_stepped.set()
            self.before_update()
        readers = [type(c).__name__ for c in self.callbacks if may_read(c, event, "reads_weights")]
        if event == "on_train_begin":  # these events come before the first micro-batch
            begin = (event, "on_epoch_begin", "on_step_begin")
            self.load(any(implements(one, name) for one in self.callbacks for name in begin))
        if event in _EVERY_STEP and self.engine.topology.dp > 1:
            for name in [name for name in readers if name not in self._told]:
                logger.warning(
                    "%s.%s may read weights, so every step waits for them before it; if it reads none, set the class "
                    "attribute reads_weights = False",
                    name,
                    event,
                )
            self._told.update(readers)
        if event == "on_train_end":  # where the weights are final
            self.before_update()
            self.engine.finish_updates(args.max_grad_norm if (args.max_grad_norm or 0.0) > 0.0 else None)
        if readers or event == "on_train_end":
            self.flush()
        before = self._weights() if event == "on_substep_end" else []
        control = super().call_event(event, args, state, control, **named)  # type: ignore[no-untyped-call]
        if before != (self._weights() if before else []):
            names = {type(c).__name__ for c in self.callbacks if implements(c, event)}
            raise ConfigError(
                f"{', '.join(sorted(names))}.on_substep_end has written or frozen weights, between two micro-batches "
                "of a step, and here the event comes before all of them are computed: do it in on_step_begin, or "
                "on_step_end"
            )
        self.flags.follow(event, control, state.global_step, acts_within=self._acts_within)
        return control

    def _weights(self) -> list[tuple[int, bool]]:
        """Returns what shows that callbacks of the user's have changed weights within a step, if they may."""
        if not any(implements(callback, "on_substep_end") for callback in self.callbacks):
            return []
        return [(parameter._version, parameter.requires_grad) for parameter in self.engine.model.parameters()]

    def compare(self, state: Any, control: Any) -> None:
        """The flags of `control` are those that any process has set; every process calls."""
        self.flags.compare(control, state.global_step, acts_within=self._acts_within)

    @property
    def _acts_within(self) -> bool:
        return any(implements(c, event) for c in self.callbacks for event in ("on_step_begin", "on_substep_end"))


def may_read(callback: TrainerCallback, event: str, attribute: str) -> bool:
    """Whether a callback of the user's implements `event` and does not deny with `attribute` that it reads there."""
    return bool(getattr(callback, attribute, True)) and implements(callback, event)


def implements(callback: TrainerCallback, event: str) -> bool:
    """Whether it has code of the user's for `event`: of its class, or set on the object."""
    kind = type(callback)
    if event in vars(callback):
        return True
    if kind.__module__.split(".")[0] in ("transformers", "fold3d"):
        return False
    return getattr(kind, event, None) is not getattr(TrainerCallback, event, None)
