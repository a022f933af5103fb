"""BlockOperators: the operators of torch that a model's divided blocks run, compared with those that ran when it was
proved how they are divided.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fold3d._C import NumberSet, OperatorRun, pause_operators, same_origin, swap_operator_run
from fold3d.sharding.plan import ShardingPlan
from fold3d.torch_private import in_backward
from fold3d.trace.arguments import caches_in

Operators = dict[int, str]
"""Numbers of sequences of operators that follow each other, and of operators with the origins of their tensors
(`_C.OperatorRun`), each with the name of its last operator."""


_WAYS: ContextVar[list[frozenset[int]] | None] = ContextVar("fold3d_ways", default=None)


@contextmanager
def ways() -> Iterator[list[frozenset[int]]]:
    """Yields what each call of a divided block in the body runs, as numbers (`Operators`), once it is over."""
    taken: list[frozenset[int]] = []
    token = _WAYS.set(taken)
    try:
        yield taken
    finally:
        _WAYS.reset(token)


class OperatorWatch:
    """Around forwards of a block.

    Args:
        block: whose parameters and buffers have names there.
        known: numbers that are not noted.
        note: is told of the others, once the forward is over.
    """

    def __init__(self, block: nn.Module, known: NumberSet, note: Callable[[Operators], None]) -> None:
        self._block, self._known, self._note = block, known, note
        self._held: list[tuple[dict[str, Any], str, int, int]] | None = None

    @contextmanager
    def around(self, *call: Any) -> Iterator[None]:
        """Notes what the body runs. What backward computes again ran before.

        Args:
            call: what the block's code is given.
        """
        if in_backward():
            yield
            return
        if self._held is None:
            self._held = _held_by(self._block)
        ways = _WAYS.get()
        run = OperatorRun(self._known if ways is None else NumberSet(), self._held, call)
        before = swap_operator_run(run)
        try:
            yield
        finally:
            swap_operator_run(before)
        found = dict(run.unknown)
        if ways is not None:
            ways.append(frozenset(found))
            found = {number: last for number, last in found.items() if number not in self._known}
        if found:
            self._note(found)


_FIRST_BIT, _BITS = 16, 48
"""Of `Origin.given` (csrc/runtime/watch), for parameters and buffers."""


def _held_by(block: nn.Module) -> list[tuple[dict[str, Any], str, int, int]]:
    """Returns where the parameters and buffers of a block are held, which may be put there anew, each with a number for
    its name, the same in every process, and a bit; those in a ModuleList's modules have the names of the first one's,
    since a batch decides which experts run."""
    found: list[tuple[dict[str, Any], str, int, int]] = []
    names: dict[str, int] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_list = isinstance(module, (nn.ModuleList, nn.ParameterList))
        for store in (module._parameters, module._buffers):
            for key in store:
                name = f"{path}#" if is_list else f"{path}{key}"
                number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
                found.append((store, key, number, _FIRST_BIT + names.setdefault(name, len(names)) % _BITS))
        for key, child in module.named_children():
            walk(child, f"{path}#." if is_list else f"{path}{key}.")

    walk(block, "")
    return found


@contextmanager
def of_fold3d() -> Iterator[None]:
    """What the body runs are no operators of the user's."""
    before = pause_operators(True)
    try:
        yield
    finally:
        pause_operators(before)


@contextmanager
def without_caches(call: Any) -> Iterator[None]:
    """What the body does to transformers' caches among the arguments of a call are no operators of the user's: it is
    proved without them, since in training nobody reads them."""
    caches = [cache for one in tree_leaves(call) for cache in caches_in(one)]
    for cache in caches:
        vars(cache)["update"] = _unnoticed(cache.update)
    try:
        yield
    finally:
        for cache in caches:
            vars(cache).pop("update", None)


def _unnoticed(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def updated(*args: Any, **kwargs: Any) -> Any:
        with of_fold3d():
            made = update(*args, **kwargs)
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        for result, source in zip(tree_leaves(made), given, strict=False):
            if isinstance(result, Tensor):
                same_origin(result, source)
        return made

    return updated


class BlockOperators:
    """Of one model on one rank.

    The first micro-batch, or the Engine's `example`, says what a block runs, and with that it was proved that ranks
    which share the block compute what one process does. Code may take another way with other arguments, or once an
    attribute has changed: a mean over neurons, say, of which a rank has a part. Such code runs operators in another
    order, or on other tensors, which is noted; whoever runs the block then has to prove it again.
    """

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._known: dict[int, NumberSet] = {}
        """Of blocks that are divided alike, by the identity of their split."""
        self._have_run: set[int] = set()
        self._new: dict[str, Operators] = {}

    def watch(self, name: str, block: nn.Module) -> OperatorWatch:
        """Returns what notes operators of block `name`."""

        def note(found: Operators) -> None:
            self._new.setdefault(name, {}).update(found)

        return OperatorWatch(block, self._known_of(name), note)

    def take_new(self) -> Iterator[tuple[str, Operators, bool]]:
        """Yields the name of each block that has run what was not proved, what that is, and whether no block like it
        had run before. What was yielded is known when the next one is asked for."""
        new, self._new = self._new, {}
        for name, noted in new.items():
            known, has_run = self._known_of(name), id(self._plan.blocks[name]) in self._have_run
            found = {sequence: last for sequence, last in noted.items() if sequence not in known}
            if found and (has_run or not found.keys() <= self._proved_of(name)):
                yield name, found, not has_run
            for sequence in found:
                known.add(sequence)
        self._have_run |= {id(self._plan.blocks[name]) for name in new}

    def _proved_of(self, name: str) -> set[int]:
        shared = self._plan.sequence.get(name)
        return set(self._plan.blocks[name].operators if shared is None else shared.operators)

    def _known_of(self, name: str) -> NumberSet:
        return self._known.setdefault(id(self._plan.blocks[name]), NumberSet())
