"""BlockOperators: the operators of torch that a model's divided blocks run, compared with those that ran when it was
proved how they are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.utils._pytree import tree_leaves

from fold3d._C import NumberSet, OperatorRun, pause_operators, swap_operator_run
from fold3d.sharding.plan import ShardingPlan
from fold3d.torch_private import in_backward
from fold3d.trace.arguments import caches_in

Operators = dict[int, str]
"""Sequences of operators that follow each other, each with the name of its last one."""


_WAYS: ContextVar[list[frozenset[int]] | None] = ContextVar("fold3d_ways", default=None)


@contextmanager
def ways() -> Iterator[list[frozenset[int]]]:
    """Yields what each call of a divided block in the body runs, as sequences of operators, once it is over."""
    taken: list[frozenset[int]] = []
    token = _WAYS.set(taken)
    try:
        yield taken
    finally:
        _WAYS.reset(token)


class OperatorWatch:
    """Around forwards of a block.

    Args:
        known: sequences that are not noted.
        note: is told of the others, once the forward is over.
    """

    def __init__(self, known: NumberSet, note: Callable[[Operators], None]) -> None:
        self._known, self._note = known, note

    @contextmanager
    def around(self) -> Iterator[None]:
        """Notes what the body runs. What backward computes again ran before."""
        if in_backward():
            yield
            return
        ways = _WAYS.get()
        run = OperatorRun(self._known if ways is None else NumberSet())
        before = swap_operator_run(run)
        try:
            yield
        finally:
            swap_operator_run(before)
        found = dict(run.unknown)
        if ways is not None:
            ways.append(frozenset(found))
            found = {sequence: last for sequence, last in found.items() if sequence not in self._known}
        if found:
            self._note(found)


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
        vars(cache)["update"] = of_fold3d()(cache.update)
    try:
        yield
    finally:
        for cache in caches:
            vars(cache).pop("update", None)


class BlockOperators:
    """Of one model on one rank.

    The first micro-batch, or the Engine's `example`, says what a block runs, and with that it was proved that ranks
    which share the block compute what one process does. Code may take another way with other arguments, or once an
    attribute has changed: a mean over neurons, say, of which a rank has a part. Such code runs operators in another
    order, which is noted; whoever runs the block then has to prove it again.
    """

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._known: dict[int, NumberSet] = {}
        """Of blocks that are divided alike, by the identity of their split."""
        self._have_run: set[int] = set()
        self._new: dict[str, Operators] = {}

    def watch(self, name: str) -> OperatorWatch:
        """Returns what notes operators of block `name`."""

        def note(found: Operators) -> None:
            self._new.setdefault(name, {}).update(found)

        return OperatorWatch(self._known_of(name), note)

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
