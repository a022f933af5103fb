"""BlockClasses: which blocks of a model are alike, so that what holds for one holds for the others."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fold3d.splitting.capture import CapturedCall
from fold3d.splitting.infer import close
from fold3d.splitting.overrides import Overrides
from fold3d.splitting.probe import Probe
from fold3d.tensor_parallel.slices import paths_of


class BlockClasses:
    """Blocks are alike if they are made of the same modules, are called alike, and compute the same from the same
    weights and arguments, in evaluation and in training.

    The last is tried, without the weights: what a block's code reads besides them, such as its number in the model, may
    mean nothing, or be a number of heads. Only blocks that differ in nothing but whole numbers which nothing reads, as
    the first of them computes the same without these, are alike untried.
    """

    def __init__(self, overrides: Overrides) -> None:
        self._overrides = overrides
        self._first: dict[Hashable, CapturedCall] = {}
        self._values: dict[Hashable, list[list[Tensor]]] = {}
        self._unread: dict[Hashable, bool] = {}

    def of(self, name: str, call: CapturedCall) -> Hashable:
        """Returns what is equal for blocks that are alike. Raises: whatever the block raises."""
        made = self.made_of(name, call)
        first = self._first.setdefault(made, call)
        if first is not call:
            numbers = numbers_that_differ(first.block, call.block)
            if numbers is not None and self._are_unread(made, numbers):
                return made, 0
        values = _computed(replace(first, block=call.block))
        known = self._values.setdefault(made, [])
        number = next((k for k, one in enumerate(known) if close(one, values)), len(known))
        if number == len(known):
            known.append(values)
        return made, number

    def _are_unread(self, made: Hashable, numbers: frozenset[Number]) -> bool:
        """Whether the first block made so computes what it does where nothing can be done with these numbers, too."""
        key = made, numbers
        if numbers and key not in self._unread:
            first = self._first[made]
            without = copy.deepcopy(first.block)
            for path, name in numbers:
                vars(without.get_submodule(path))[name] = _Unreadable()
            try:
                self._unread[key] = close(self._values[made][0], _computed(replace(first, block=without)))
            except Exception:  # whatever code does with one
                self._unread[key] = False
        return self._unread.get(key, True)

    def made_of(self, name: str, call: CapturedCall) -> Hashable:
        """Returns of what modules a block is made, and how it is called."""
        modules = tuple(
            (path, type(module), tuple((key, p.shape) for key, p in module.named_parameters(recurse=False)))
            for path, module in call.block.named_modules()
        )
        leaves, spec = tree_flatten((call.args, call.kwargs))
        kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        return modules, str(spec), kinds, call.read, tuple(self._overrides.of_block(name, call.block).items())


class _Unreadable:
    """In the place of a number: it can be handed on, and nothing else."""

    def _fail(self, *_: Any) -> Any:
        raise TypeError("a number is read")

    __eq__ = __ne__ = __hash__ = __bool__ = __str__ = __repr__ = __format__ = _fail

    def __deepcopy__(self, memo: Any) -> _Unreadable:
        return self


Number = tuple[str, str]
"""Name of a module in a block, and of its attribute."""


def numbers_that_differ(one: nn.Module, other: nn.Module) -> frozenset[Number] | None:
    """Returns the whole numbers in which blocks of the same modules differ; None if they differ in anything else, or
    that cannot be told."""
    found = set()
    for (path, mine), its in zip(one.named_modules(), other.modules(), strict=True):
        if vars(mine).keys() != vars(its).keys():
            return None
        for name, value in vars(mine).items():
            second = vars(its)[name]
            if type(value) is type(second) is int:
                if value != second:
                    found.add((path, name))
            elif name not in ("_parameters", "_modules") and not _same(value, second):
                return None
    return frozenset(found)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other) if not (one.is_meta or other.is_meta) else False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, (int, float, str, set, frozenset)) and one == other


def differs_in_training(call: CapturedCall) -> bool:
    """Returns whether a block computes something else in training than in evaluation, but for what it draws, or changes
    buffers there. False where that cannot be said, because it draws in ways of its own."""
    probe = Probe(call)
    evaluated = _values(probe)
    before = [buffer.clone() for buffer in probe.block.buffers()]
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        trained = _values(probe, training=True)
        if not torch.equal(state, torch.get_rng_state()):
            return False
    return not close(evaluated, trained) or not close(before, list(probe.block.buffers()))


def _computed(call: CapturedCall) -> list[Tensor]:
    probe = Probe(call)
    evaluated = _values(probe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return evaluated + _values(probe, training=True, draws=True)


def _values(probe: Probe, training: bool = False, draws: bool = False) -> list[Tensor]:
    """Returns what goes into each matrix product, and the block's results."""
    seen = probe.run_in_training(draws) if training else probe.run()
    results = [leaf.detach() for _, leaf in paths_of(probe.output)]
    return [*(x for inputs in seen.values() for x in inputs), *results]
