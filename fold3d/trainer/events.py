"""EventHandler: what must hold when a callback runs, and what becomes of what it sets."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from fold3d.engine.engine import Engine
from fold3d.errors import ConfigError
from fold3d.trainer.control import ControlFlags


class EventHandler(CallbackHandler):
    """The stock handler. A callback of the user's runs when nobody copies the weights any more for a checkpoint: it may
    change them. One that reads weights waits for their updates where it does (see `ParameterReadiness`).

    What callbacks set of `control` on one process is set on all, see `ControlFlags`.
    """

    engine: Engine
    flags: ControlFlags
    has_stepped: Event
    """Set once the optimizer is about to step."""
    save_is_under_way: Callable[[], bool]
    """Whether the checkpoint of the step that has just ended is not complete yet."""
    wait: Callable[[], None]
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
        wait: Callable[[], None],
        before_update: Callable[[], None],
        load: Callable[[bool], None],
    ) -> None:
        """Turns the stock Trainer's `handler` into one of these; its list of callbacks is the user's.

        Args:
            wait: is called before somebody may change weights.
            before_update: is called before the optimizer steps.
            load: is called when a training begins; whether a callback of this process may read or change what it
                begins with.
        """
        handler.__class__ = cls
        assert isinstance(handler, cls)
        handler.engine, handler.has_stepped = engine, has_stepped
        handler.flags = ControlFlags(engine)
        handler.save_is_under_way = save_is_under_way
        handler.wait, handler.before_update, handler.load = wait, before_update, load

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        """Calls the callbacks, unless there is no checkpoint yet that they could look at."""
        control.should_save = False
        return control if self.save_is_under_way() else super().on_save(args, state, control, **named)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        """Calls the callbacks."""
        if event == "on_pre_optimizer_step":
            self.has_stepped.set()
            self.before_update()
        if event == "on_train_begin":  # these events come before the first micro-batch
            begin = (event, "on_epoch_begin", "on_step_begin")
            self.load(any(implements(one, name) for one in self.callbacks for name in begin))
        if event == "on_train_end":  # where the weights are final
            self.before_update()
            self.engine.finish_updates(args.max_grad_norm if (args.max_grad_norm or 0.0) > 0.0 else None)
            self.engine.flush()
        before = []
        if any(implements(callback, event) for callback in self.callbacks):
            self.wait()
            if event == "on_substep_end":
                self.engine.flush()  # so that no update of theirs changes weights meanwhile
                before = self._weights()
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
        """Returns what shows that callbacks of the user's have changed weights within a step."""
        return [(parameter._version, parameter.requires_grad) for parameter in self.engine.model.parameters()]

    def compare(self, state: Any, control: Any) -> None:
        """The flags of `control` are those that any process has set; every process calls."""
        self.flags.compare(control, state.global_step, acts_within=self._acts_within)

    @property
    def _acts_within(self) -> bool:
        return any(implements(c, event) for c in self.callbacks for event in ("on_step_begin", "on_substep_end"))


def may_read_gradients(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback of the user's implements `event` and does not deny that it reads gradients there."""
    return bool(getattr(callback, "reads_gradients", True)) and implements(callback, event)


def implements(callback: TrainerCallback, event: str) -> bool:
    """Whether it has code of the user's for `event`: of its class, or set on the object."""
    kind = type(callback)
    if event in vars(callback):
        return True
    if kind.__module__.split(".")[0] in ("transformers", "fold3d"):
        return False
    return getattr(kind, event, None) is not getattr(TrainerCallback, event, None)
