"""Modules inside of blocks whose results hooks hand on: in the chunk that runs a block, and in those behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.trace.errors import SplitError
from fold3d.trace.model_trace import Trace
from fold3d.trace.results.hooked_call import HookedCall
from fold3d.trace.wrappers import wrap


def hooked_modules(trace: Trace) -> list[str]:
    """Returns the modules whose results cross any border since hooks hand them on."""
    crossing = {value.module for border in trace.crossings for one in border for value in one.values}
    return [name for name in dict.fromkeys(one.module for calls in trace.hooked for one in calls) if name in crossing]


class BlockRun:
    """One run of a block in its chunk: tells which of the recorded calls a call of a module inside of it is."""

    def __init__(self, calls: Iterable[HookedCall]) -> None:
        self._calls = {(one.module, one.place): one.call for one in calls}
        self._places: dict[str, int] = {}

    def call_of(self, module: str) -> int | None:
        """Returns the number in the forward of the call that has just ended; None for one that was not recorded."""
        place = self._places.get(module, 0)
        self._places[module] = place + 1
        return self._calls.get((module, place))


def show(
    model: nn.Module,
    calls: Sequence[HookedCall],
    received: Mapping[tuple[str, int], Mapping[int, Tensor]],
    given: Sequence[Any],
) -> None:
    """Shows hooks on modules inside of a block that is left out what these modules returned.

    Hooks are called in their order, with those first arguments of the module's that the block was given. Of what nobody
    reads, which was not received, tensors are empty: hooks collect it nevertheless, so that everything has its place.

    Args:
        calls: of the block.
        received: (module, call) -> its tensors, by number.
        given: the leaves of the block's arguments.
    Raises: SplitError when a hook fails without the other arguments.
    """
    for one in calls:
        tensors = received.get((one.module, one.call), {})
        output = one.structure.unflatten(
            [tensors[number] if number in tensors else torch.empty(0) for number in range(one.structure.num_tensors)]
        )
        module = model.get_submodule(one.module)
        undo = wrap(module, lambda *_, output=output, **__: output)
        try:
            module(*(given[number] for number in one.given))
        except Exception as error:
            raise SplitError(
                f"a hook of '{one.module}' fails with {type(error).__name__}: {error}. Its result is read behind a "
                "cut, and hooks run there again, on the result and what the block hands on to the module as it is: all "
                "else that it was given is in another part of the model. Let the hook read nothing but the result, "
                "take it off, or set pp=1 and segments=1"
            ) from error
        finally:
            undo()
