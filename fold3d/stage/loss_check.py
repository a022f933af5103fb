"""LossCheck: finds out, before a model that is cut runs, whether the loss reads what other processes compute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from fold3d.stage.aside import AsideError, aside
from fold3d.stage.call_guard import CALLED_AGAIN, WAYS_OUT
from fold3d.stage.micro_batch import reads_only_loss
from fold3d.trace.errors import SplitError
from fold3d.trace.loss_recorder import CalledAgainError, record_loss
from fold3d.trace.model_trace import Trace
from fold3d.trace.results.crossing import Value
from fold3d.trace.users_hooks import is_ours, users_hooks

logger = logging.getLogger(__name__)

_Hooks = tuple[tuple[str, int], ...]
"""The module's name and the hook's identity, for each of them."""
_SECONDS = 30.0
"""How long a loss function may take on tensors without values."""


class LossCheck:
    """Follows the loss function through a whole forward, where hooks or modules may keep tensors for it.

    A process runs its own chunks: what a hook of the user's, or a module, keeps of a layer of another chunk is missing
    there, or stands in for it. So the user's code runs once on tensors without values, in a copy of the process (its
    lists, counters and files stay as they are), and all that is read across a border of chunks is an error. This is
    done when training or evaluation begins and whenever hooks have been registered since, and only where there is a
    loss function of the user's, a hook of theirs, or an attribute that keeps anything.

    Args:
        ranges: [first, end) block of every chunk.
        uncut: gives the model its own forward back, in the copy of the process.
    """

    def __init__(
        self, model: Module, trace: Trace, ranges: Sequence[tuple[int, int]], uncut: Callable[[], None]
    ) -> None:
        self._model, self._trace, self._ranges, self._uncut = model, trace, list(ranges), uncut
        self._hooks_ever = -1
        self._known: set[tuple[bool, _Hooks]] = set()
        self._hooks: _Hooks = ()

    def look(self, call: Callable[[Module, dict[str, Any]], Any], batch: Mapping[str, Any]) -> None:
        """Checks `call(model, batch)`, unless that is known to be right.

        Raises: SplitError when a process would not find what the call reads.
        """
        if self._hooks_ever != RemovableHandle.next_id:  # counts all hooks that were ever registered
            self._hooks_ever = RemovableHandle.next_id
            self._hooks = tuple(
                (name, id(hook))
                for name, module in self._model.named_modules()
                for hook in users_hooks(module, backward=False)
            )
        key = (self._model.training, self._hooks)
        if key in self._known or not (self._hooks or self._trace.kept or has_users_code(call)):
            return
        self._check(call, batch)
        self._known.add(key)

    def _check(self, call: Callable[[Module, dict[str, Any]], Any], batch: Mapping[str, Any]) -> None:
        known = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), dict(batch))
        hooked = list(dict.fromkeys(name for name, _ in self._hooks))
        kept = _listing("a hook of", hooked) or _listing("the attribute", self._trace.kept) or "a hook"
        problem, followed, called_again = "", False, 0
        for truth in (True, False):
            try:
                found = aside(partial(self._record, call, known, truth), _SECONDS)
            except AsideError as error:
                problem = str(error)
                if error.took_too_long:
                    break
                continue
            if isinstance(found, bool):  # the model is called again; it may not be, where a condition led there
                called_again += 1
                if not found or called_again == 2:
                    raise SplitError(CALLED_AGAIN)
                continue
            followed = True
            borders, crossings, guessed = found
            for lo, _ in self._ranges[1:]:
                known_there = {value for crossing in self._trace.crossings[lo] for value in crossing.values}
                unknown = [reason for value, reason in crossings[lo].items() if value not in known_there]
                reason = borders[lo] or next(iter(unknown), "")
                if reason:
                    raise SplitError(
                        f"{reason}, and the cut of the model before block '{self._trace.blocks[lo]}' lies "
                        f"between: what {kept} keeps there is not in the process, or not of the micro-batch, that "
                        f"reads it. {WAYS_OUT}"
                    )
            if not guessed:
                break
        if self._hooks and not followed:
            logger.warning(
                "whether the loss function reads what %s keeps could not be found out (%s). If it does, set pp=1 and "
                "segments=1: of layers that another process runs, or another chunk, nothing is kept",
                kept,
                problem,
            )

    def _record(
        self, call: Callable[[Module, dict[str, Any]], Any], batch: dict[str, Any], truth: bool
    ) -> tuple[tuple[str, ...], tuple[dict[Value, str], ...], bool] | bool:
        """Returns what `record_loss` does; where the model is called again, whether a guess had led there."""
        self._uncut()
        try:
            with torch.set_grad_enabled(self._model.training):
                return record_loss(self._model, self._trace.modules, call, batch, truth, reads_only_loss(call))
        except CalledAgainError as error:
            return error.guessed


def has_users_code(call: Callable[..., Any]) -> bool:
    """Returns whether `call` is a function of the user's, or calls one, as its attribute `calls_users_code` says."""
    return not is_ours(call) or getattr(call, "calls_users_code", False)


def _listing(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{what} {names[0] or 'the model'}{more}" if names else ""
