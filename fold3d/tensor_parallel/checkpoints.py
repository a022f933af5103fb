"""CheckpointMemory: what code in an activation checkpoint must find again when backward runs it once more."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch.utils.checkpoint import CheckpointFunction

from fold3d.torch_private import checkpoint_around, functions_around

T = TypeVar("T")


@dataclass(slots=True)
class CheckpointRun:
    """One run of a checkpoint's code: its forward, or one of its runs in backward."""

    again: bool
    """Whether backward runs it."""
    values: dict[Hashable, Any]
    """What was kept in the checkpoint, in any run of it."""
    calls: int = 0
    """How often `CheckpointMemory.count` was called in it."""


class CheckpointMemory:
    """Values of one owner, by the innermost torch.utils.checkpoint in which they were kept. They go with its graph.

    A reentrant checkpoint keeps nothing: in it there is no graph.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()
        self._runs: WeakKeyDictionary[Any, CheckpointRun] = WeakKeyDictionary()

    def run(self) -> CheckpointRun | None:
        """Returns the run in which the caller is; None outside of a checkpoint."""
        here = checkpoint_around()
        if here is None:
            return None
        run = self._runs.get(here.run)
        if run is None:
            run = self._runs[here.run] = CheckpointRun(here.again, self._values.setdefault(here.frame, {}))
        return run

    def recall(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` returns; where backward runs a checkpoint again, what it returned for `key` before."""
        run = self.run()
        if run is None:
            return make()
        if not run.again or key not in run.values:
            run.values[key] = make()
        value: T = run.values[key]
        return value


def in_reentrant_checkpoint() -> bool:
    """Returns whether the caller runs inside the forward of a reentrant torch.utils.checkpoint. Slow: walks the
    stack."""
    return CheckpointFunction in functions_around()


def function_around() -> str:
    """Returns which torch.autograd.Function the caller runs in the forward of, why that cannot be cut, and what to do
    instead; "" outside of one. Slow, as `in_reentrant_checkpoint`."""
    for function in functions_around():
        if function is CheckpointFunction:
            return (
                "a reentrant torch.utils.checkpoint, through which no gradient reaches another chunk. Pass "
                "use_reentrant=False to checkpoint, or switch it off and set recompute=True."
            )
        return (
            f"the forward of a torch.autograd.Function ({function.__name__}), whose backward computes gradients in its "
            "own way, so that none reaches another chunk. Such a model trains in one piece: pp=1, segments=1."
        )
    return ""
