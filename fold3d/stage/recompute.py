"""Activation checkpointing around blocks, or around modules inside of them."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fold3d.errors import ConfigError
from fold3d.placement.recomputed_blocks import modules_inside
from fold3d.recompute import WORDS, Choice, Recompute
from fold3d.stage.replay import Before, ChangedBuffers, DrawnNumbers
from fold3d.stage.users_state import may_write_unseen
from fold3d.trace.arguments import cached_tokens, without_key_values
from fold3d.trace.coat import Coat, Wrap

_MOST_NAMES = 20
"""That a message lists."""


def recomputed(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `forward` of `module` such that its activations are recomputed in backward instead of kept.

    Without effect where there is nothing to keep (evaluation, no_grad) and where the block checkpoints itself
    (transformers' gradient checkpointing). A key-value cache is not handed on, because recomputing would fill
    it twice. Buffers change once, and Python's and numpy's numbers are drawn once.
    """
    buffers = ChangedBuffers(module, (), unseen=may_write_unseen(module))

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()) or getattr(module, "gradient_checkpointing", False):
            return forward(*args, **kwargs)
        if count := cached_tokens(module, args, kwargs):
            raise ConfigError(
                f"recompute: a {type(module).__name__} is given a key-value cache that has {count} tokens in it "
                "already, such as those of a trained prefix. To recompute it would add its own twice: set "
                'recompute="none", or segments=2 with recompute="full"'
            )
        args, kwargs = without_key_values(args, kwargs)
        # torch looks for devices, whose generators and autocast backward finds again, among what it is given by place.
        here = [torch.empty(0, device=one.device) for one in itertools.islice(module.parameters(), 1)]
        runs = _Runs(forward, buffers, len(args), tuple(kwargs))
        return checkpoint(runs, *args, *kwargs.values(), *here, use_reentrant=False)

    return checkpointed


class _Runs:
    """A forward that backward runs again."""

    def __init__(self, forward: Callable[..., Any], buffers: ChangedBuffers, count: int, names: Sequence[str]) -> None:
        """Args:
        count: of the arguments that are given by place; those called `names` follow.
        """
        self._forward, self._buffers, self._count, self._names = forward, buffers, count, names
        self._drawn, self._before = DrawnNumbers(), Before()
        self._has_run = False

    def __call__(self, *args: Any) -> Any:
        again, self._has_run = self._has_run, True
        around = self._buffers.again(self._before) if again else self._buffers.of_chunk(0, self._before)
        with self._drawn.once(0, again=again), around:
            return self._forward(*args[: self._count], **dict(zip(self._names, args[self._count :], strict=False)))


def recompute_modules(coat: Coat, model: nn.Module, names: Iterable[str]) -> None:
    """Makes the modules of these names recompute what they compute."""
    for name in names:
        module = model.get_submodule(name)
        coat.put(Wrap.RECOMPUTED, module, recomputed(module, module.forward))


def modules_to_recompute(
    model: nn.Module, blocks: Sequence[str], ranges: Sequence[tuple[int, int]], recompute: Recompute
) -> list[str]:
    """Returns the modules inside of blocks that are recomputed, the outermost of those that patterns name.

    Args:
        ranges: blocks [first, end) of every chunk.
    Raises: ConfigError for a pattern that names no module, and when it is said of another number of chunks.
    """
    found: list[str] = []
    unused: dict[str, str] = {}  # patterns so far -> a block without such a module
    used: set[str] = set()
    for choice, names in _chunks(blocks, ranges, recompute):
        for block in names if choice.patterns else ():
            inside = modules_inside(model.get_submodule(block))
            for pattern in choice.patterns:
                if any(fnmatchcase(name, pattern) for name in inside):
                    used.add(pattern)
                else:
                    unused.setdefault(pattern, block)
            found += [f"{block}.{name}" for name in choice.modules(inside)]
    for pattern, block in unused.items():
        if pattern not in used:
            inside = modules_inside(model.get_submodule(block))
            raise _names_none(recompute, pattern, inside, f"Block {block!r}")
    return list(dict.fromkeys(found))


def check_patterns(model: nn.Module, blocks: Sequence[str], recompute: Recompute) -> None:
    """Raises ConfigError for a pattern that names no module in any block; which chunks these are in may be open."""
    for choice in recompute.choices:
        modules_to_recompute(model, blocks, [(0, len(blocks))], Recompute((choice,)))


def check_names(model: nn.Module, recompute: Recompute) -> None:
    """Raises ConfigError for a pattern that names no module in any block, whichever modules the blocks are."""
    names = modules_inside(model, every_name=True)  # what blocks share has its first name elsewhere
    places = (place for name in names for place in accumulate(reversed(name.split(".")), lambda end, of: f"{of}.{end}"))
    inside = dict.fromkeys(places)
    for pattern in dict.fromkeys(pattern for choice in recompute.choices for pattern in choice.patterns):
        if not any(fnmatchcase(name, pattern) for name in inside):
            own = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise _names_none(recompute, pattern, [name for name in own if not name.isdecimal()], type(model).__name__)


def _names_none(recompute: Recompute, pattern: str, names: Sequence[str], where: str) -> ConfigError:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    called = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = difflib.get_close_matches(pattern, [*WORDS, *names, *called], 1)
    meant = f" (did you mean {called.get(near[0], near[0])!r}?)" if near else ""
    return ConfigError(
        f"recompute={str(recompute)!r}: {pattern!r} names no module inside of a block{meant}. {where} has "
        f"{', '.join(names[:_MOST_NAMES]) or 'none'}{more}; words of other meaning are {', '.join(WORDS)}"
    )


def _chunks(
    blocks: Sequence[str], ranges: Sequence[tuple[int, int]], recompute: Recompute
) -> list[tuple[Choice, Sequence[str]]]:
    choices = recompute.of_chunks(len(ranges))
    if len(ranges) == 1:  # nothing may be known of blocks there
        return [(choices[0], blocks)]
    return [(choice, blocks[first:end]) for choice, (first, end) in zip(choices, ranges, strict=True)]
