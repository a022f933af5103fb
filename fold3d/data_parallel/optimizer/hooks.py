"""OptimizerHooks: what the engine does right before and after an optimizer's own step, and when its state is read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from fold3d.data_parallel.optimizer.bucket_optimizer import TWINS
from fold3d.errors import ConfigError
from fold3d.trace.state import OTHER, plain, same, tensors_in


class KeepsState(Protocol):
    """Who keeps a part of the optimizer's state."""

    def before_state_dict(self) -> None:
        """The state is about to be read."""

    def split_state(self) -> None:
        """A whole state was loaded."""

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """Attributes of the optimizer were set."""


class OptimizerHooks:
    """Hooks of the engine's; those at `optimizer.step()` run inside of all that the user has there."""

    def __init__(
        self,
        optimizer: Optimizer,
        sync: KeepsState,
        *,
        flush: Callable[[], None],
        before: Callable[[], None],
        after: Callable[[], None],
    ):
        """Args:
        flush: before a state is loaded.
        before: takes the gradients; the optimizer's own step then finds none and changes nothing.
        after: the optimizer's own step is over.
        """
        self._optimizer, self._sync, self._flush = optimizer, sync, flush
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: sync.before_state_dict()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: flush()),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        self._switches = []
        for name in ("train", "eval"):  # of optimizers that keep other weights for evaluation
            if callable(switch := getattr(optimizer, name, None)):
                setattr(optimizer, name, _after(flush, switch))
                self._switches.append(name)

        self._depth = 0  # of steps that call others, as super().step() is
        self._seen = _plain_attributes(optimizer)

        def first(_: Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._depth += 1
            if self._depth > 1:
                return
            _refuse_closure(args, named)
            self._take_changed()
            before()

        def last(*_: Any) -> None:
            self._depth -= 1
            if not self._depth:
                self._seen = _plain_attributes(optimizer)
                after()

        self._before = cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks)
        self._after = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        own = (
            optimizer.register_step_pre_hook(first),
            optimizer.register_step_post_hook(last),
        )
        self._handles += own
        self._own = own[0].id, own[1].id

    def _loaded(self, _: Optimizer) -> None:
        self._seen = _plain_attributes(self._optimizer)
        self._sync.split_state()

    def _take_changed(self) -> None:
        """What was set between two steps is set for layers that are stepped apart, too."""
        now = _plain_attributes(self._optimizer)
        changed = {name: now[name] for name, value in self._seen.items() if name in now and not same(now[name], value)}
        if changed:
            self._flush()
            self._sync.set_attributes(changed)

    def put_innermost(self) -> None:
        """Lets hooks that were registered meanwhile run before and after the engine's."""
        self._depth = 0  # of a step that has failed
        self._before.move_to_end(self._own[0])
        self._after.move_to_end(self._own[1], last=False)

    def remove(self) -> None:
        """Leaves the optimizer to itself."""
        for handle in self._handles:
            handle.remove()
        for name in self._switches:
            delattr(self._optimizer, name)

    @property
    def others_after(self) -> bool:
        """Whether the user has hooks after the step, which may read weights, too."""
        return len(self._after) > 1 or bool(_global_optimizer_post_hooks)


_NOT_SET = frozenset(
    (
        *("state", "param_groups", "_opt_called", "_step_count", "_zero_grad_profile_name"),
        "_warned_capturable_if_run_uncaptured",
    )
)
"""Attributes that are looked at elsewhere, and those that torch sets for itself."""


def _plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    found = ((name, plain(value)) for name, value in vars(optimizer).items() if name not in _NOT_SET)
    return {name: value for name, value in found if value is not OTHER and not any(True for _ in tensors_in(value))}


def _refuse_closure(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if any(callable(one) for one in (*args[1:], *named.values())):
        raise ConfigError(
            "optimizer.step(closure): gradients are summed and taken before the optimizer's own step begins, and the "
            "closure would compute others behind that; call it first, and then optimizer.step() without one"
        )


def _after(flush: Callable[[], None], switch: Callable[[], Any]) -> Callable[[], Any]:
    def flushing() -> Any:
        flush()
        return switch()

    return flushing


def has_hooks(optimizer: Optimizer, besides: tuple[object, object]) -> bool:
    """Whether anybody has hooks at the optimizer's step, which may read gradients.

    Args:
        besides: what has one before and one after the step of its own, or None.
    """
    before, after = (0 if owner is None else 1 for owner in besides)
    counts = len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    elsewhere = bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
    return elsewhere or counts[0] > before or counts[1] > after


@contextmanager
def refuse_steps(parameters: Collection[Parameter]) -> Iterator[None]:
    """While gradients are computed: an optimizer that steps any of `parameters`, in a gradient's hook say, would find
    those of one process, of the micro-batches so far. Twins, which step layers before their forwards, may. Raises:
    ConfigError in its step."""

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in TWINS:
            return
        own = set(map(id, parameters))  # here: in most steps nobody asks
        if any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__} steps while the backwards of a step run (in a hook of a gradient, say), "
                "and would find the gradients of one process and of some micro-batches: let it step after Engine.run, "
                "or train with one process, segments=1"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
