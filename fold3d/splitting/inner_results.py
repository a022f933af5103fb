"""inner_results(): what a block and the modules inside of it return on ranks that share it, found by running them.

transformers hands attention weights and router logits to the model's caller by hooks on such modules, or its blocks
return them beside the hidden state. A rank computes them of its own heads, or of its part of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.errors import Fold3dError
from fold3d.sharding.shard import Runs, Shard, even_part, runs_of
from fold3d.sharding.split import BlockSplit, InnerResult, Path, SequenceSplit, TensorSlice
from fold3d.splitting.capture import SAMPLES, CapturedCall
from fold3d.splitting.proof import BlockRuns, differ
from fold3d.tensor_parallel.linear import is_linear, is_transposed
from fold3d.tensor_parallel.slices import paths_of, take_part

Channels = tuple[int, Sequence[Sequence[int]]]
"""How many channels there are, and those of each rank, one for each of its units or more."""


def placements(
    whole: int, parts: Sequence[int], times: Iterable[int], channels: Iterable[Channels]
) -> Iterator[tuple[int, tuple[Runs, ...]]]:
    """Yields (period, each rank's indices within one period) for a dimension of `whole` entries, of which the ranks
    have so many, the likeliest first.

    Args:
        times: how often the units may lie in it, as where samples and heads lie in one dimension.
    """
    seen = set()
    known = list(channels)
    for often in times:
        period, rest = divmod(whole, often)
        if rest:
            continue
        for count, of_ranks in known:
            if count % period:
                continue
            indices = [sorted({channel * period // count for channel in mine}) for mine in of_ranks]
            if any(len(mine) * often != part for mine, part in zip(indices, parts, strict=True)):
                continue
            found = period, tuple(runs_of(mine) for mine in indices)
            if found not in seen:
                seen.add(found)
                yield found


def exit_channels(block: nn.Module, split: BlockSplit) -> Iterator[Channels]:
    """Yields the input channels of each region's exits."""
    for group in split.groups:
        for name in group.exits:
            shard = split.shards.get(f"{name}.weight")
            module = block.get_submodule(name)
            if shard is not None and is_linear(module) and shard.dim == (0 if is_transposed(module) else 1):
                yield _channels(shard)


def channels_of(split: BlockSplit) -> Iterator[Channels]:
    """Yields the channels of each parameter that is spread, equal ones once."""
    kinds = {(shard.size, shard.parts): shard for shard in split.shards.values() if not shard.is_replicated}
    yield from map(_channels, kinds.values())


def _channels(shard: Shard) -> Channels:
    return shard.size, [_indices(runs) for runs in shard.parts]


def _indices(runs: Runs) -> list[int]:
    return [index for first, end in runs for index in range(first, end)]


_Calls = dict[str, list[dict[Path, Tensor]]]
"""Of each module the tensors that it returned in each of its calls, by their places."""


def with_inner(call: CapturedCall, split: BlockSplit, tp: int) -> BlockSplit:
    """Returns the split with `inner`."""
    return replace(split, inner=inner_results(call, split, tp)) if split.groups else split


def inner_results(
    call: CapturedCall, split: BlockSplit, tp: int, sequence: SequenceSplit | None = None
) -> tuple[InnerResult, ...]:
    """Returns what a block and the modules inside of it return where `tp` ranks share it, and the sequence if that is
    given; those that return one tensor, which every rank has whole, are left out.

    Args:
        split: with `inner`, where the sequence is given: what has units then has the same ones, and of whatever is
            whole otherwise a rank may have a part of the sequence. Sizes alone do not tell these apart.
    """
    names = [name for name, module in call.block.named_modules() if _may_run(module)]
    whole: _Calls = {}
    ranks: list[_Calls] = [{} for _ in range(tp)]
    try:
        runs = BlockRuns(call, split, tp, training=False)
        runs.whole(watch=partial(_watched, whole))
        runs.ranks(split, watches=[partial(_watched, one) for one in ranks], sequence=sequence)
    except (IndexError, RuntimeError, TypeError, ValueError, Fold3dError):
        whole = {}  # nothing is known of any
    hidden = None if sequence is None else call.shape_at(sequence.hidden)
    ways = _Ways(split) if sequence is None or hidden is None else _WaysOfSequence(split, tp, sequence, hidden)
    every = (_result(name, whole.get(name, []), [calls.get(name, []) for calls in ranks], ways) for name in names)
    found = (one if one.module else _with_proved(one, call.read) for one in every)
    return tuple(one for one in found if not _is_one_whole_tensor(one, whole.get(one.module, [])))


def _with_proved(block: InnerResult, read: frozenset[Path]) -> InnerResult:
    """Returns what is known of a block's result: what later blocks read is proved, whatever becomes of the rest."""
    proved = tuple(sorted(read.difference(block.whole), key=str))
    return replace(
        block,
        whole=(*block.whole, *proved),
        slices=tuple(one for one in block.slices if one.path not in proved),
        rows=tuple(path for path in block.rows if path not in proved),
        folded=tuple(path for path in block.folded if path not in proved),
    )


def _may_run(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(module, torch.jit.ScriptModule)


@contextmanager
def _watched(calls: _Calls, block: nn.Module) -> Iterator[None]:
    calls.clear()

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            calls.setdefault(name, []).append(dict(paths_of(output)))

        return hook

    with ExitStack() as hooks:
        for name, module in block.named_modules():
            hooks.enter_context(module.register_forward_hook(watch(name)))
        yield


def _is_one_whole_tensor(result: InnerResult, calls: list[dict[Path, Tensor]]) -> bool:
    return result.whole == ((),) and all(list(returned) == [()] for returned in calls)


def _result(
    name: str, calls: list[dict[Path, Tensor]], of_ranks: list[list[dict[Path, Tensor]]], ways: _Ways
) -> InnerResult:
    """Returns what is known of a module's result; of a tensor it is what holds in all calls."""
    found = InnerResult(module=name)
    if not calls or any(len(own) != len(calls) for own in of_ranks):
        return found
    for path in calls[0]:
        whole = [returned.get(path) for returned in calls]
        parts = [[returned.get(path) for returned in own] for own in of_ranks]
        if all(one is not None for one in (*whole, *chain.from_iterable(parts))):
            found = ways.add(found, path, _Seen(whole, parts))  # type: ignore[arg-type]
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor as it was seen in each call."""

    whole: list[Tensor]
    parts: list[list[Tensor]]
    """Per rank."""

    def fits(self, part: Callable[[Tensor, int], Tensor]) -> bool:
        """Whether this is what a rank has of the whole."""
        return all(
            _same(found, part(expected, rank))
            for rank, own in enumerate(self.parts)
            for found, expected in zip(own, self.whole, strict=True)
        )

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of it."""
        return self.fits(lambda x, _: x)

    def placements(self, path: Path, channels: Sequence[Channels]) -> Iterator[TensorSlice]:
        """Yields how the units of the ranks may lie in it."""
        sizes, whole = [own[0].shape for own in self.parts], self.whole[0].shape
        if not self.whole[0].is_floating_point() or any(len(size) != len(whole) for size in sizes):
            return
        dims = [dim for dim, length in enumerate(whole) if any(size[dim] != length for size in sizes)]
        if len(dims) != 1:
            return
        (dim,) = dims
        for period, parts in placements(whole[dim], [size[dim] for size in sizes], (1, SAMPLES), channels):
            yield TensorSlice(path=path, dim=dim, size=period, parts=parts)


class _Ways:
    """In which a rank may have a part of a tensor: that of its units."""

    def __init__(self, split: BlockSplit) -> None:
        self._channels = list(channels_of(split))

    def add(self, to: InnerResult, path: Path, seen: _Seen) -> InnerResult:
        """Returns what is known of a module, with the tensor at `path`."""
        if seen.is_whole:
            return replace(to, whole=(*to.whole, path))
        fitting = (one for one in seen.placements(path, self._channels) if seen.fits(_units(one)))
        return replace(to, slices=(*to.slices, *islice(fitting, 1)))


class _WaysOfSequence(_Ways):
    """And that of its part of the sequence."""

    def __init__(self, split: BlockSplit, tp: int, sequence: SequenceSplit, hidden: torch.Size) -> None:
        super().__init__(split)
        self._tp, self._dim, self._length = tp, sequence.dim, hidden[sequence.dim]
        self._without = {one.module: one for one in split.inner}

    def add(self, to: InnerResult, path: Path, seen: _Seen) -> InnerResult:
        if seen.is_whole:
            return replace(to, whole=(*to.whole, path))
        without = self._without.get(to.module, InnerResult(module=to.module, whole=((),)))
        if one := next((one for one in without.slices if one.path == path), None):
            return replace(to, slices=(*to.slices, one)) if seen.fits(_units(one)) else to
        if path not in without.whole or not seen.whole[0].is_floating_point():
            return to
        if seen.fits(self._rows):
            return replace(to, rows=(*to.rows, path))
        return replace(to, folded=(*to.folded, path)) if seen.fits(self._folded) else to

    def _rows(self, x: Tensor, rank: int) -> Tensor:
        if x.shape[self._dim : self._dim + 1] != (self._length,):
            return x
        first, end = even_part(self._length, self._tp, rank)
        return x.narrow(self._dim, first, end - first)

    def _folded(self, x: Tensor, rank: int) -> Tensor:
        if self._dim != 1 or x.shape[:1] != (SAMPLES * self._length,):
            return x
        return self._rows(x.reshape(SAMPLES, self._length, *x.shape[1:]), rank).flatten(0, 1)


def _units(one: TensorSlice) -> Callable[[Tensor, int], Tensor]:
    return lambda x, rank: take_part(x, one, rank)


def _same(found: Tensor, expected: Tensor) -> bool:
    return not differ(found, expected) if found.is_floating_point() else torch.equal(found, expected)
