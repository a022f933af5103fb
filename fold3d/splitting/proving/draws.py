"""with_draws(): which random numbers of a block each rank needs a part of, proved by drawing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch import nn

from fold3d.errors import Fold3dError
from fold3d.sharding.shard import runs_of
from fold3d.sharding.split import BlockSplit, Draw
from fold3d.splitting.probing.capture import CapturedCall, paths_of
from fold3d.splitting.probing.double import DoubleMode
from fold3d.splitting.proving.emulate import EmulatedGroup, EmulatedOps
from fold3d.splitting.proving.factors import Factors
from fold3d.splitting.proving.proof import differ, double_inputs, shard_block, with_weights
from fold3d.tensor_parallel.install import install_block
from fold3d.tensor_parallel.linear import is_linear, is_transposed
from fold3d.tensor_parallel.partial_draws import PartialDraws, Size

_SEED, _MOST_TRIES = 5, 16


class _Sizes(PartialDraws):
    """Writes down what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Size] = []

    def whole_of(self, size: Size, number: int) -> Size | None:
        self.sizes.append(size)
        return None


def with_draws(call: CapturedCall, split: BlockSplit, tp: int) -> BlockSplit:
    """Returns the split with `draws`, by which the ranks draw in training what the whole block draws.

    The block is run as in training, whole and as emulated ranks, and sizes are compared: a dimension in which they
    differ is one of units, whose entries each rank needs are those that its input channels of a region's exit belong
    to. Whatever is found is tried: with equal seeds the ranks' results must be the whole block's. Without it,
    the split as it is.
    """
    if not split.groups:
        return split
    try:
        runs = _Runs(call, split, tp)
        sizes = _Sizes()
        expected = dict(paths_of(runs.whole(sizes)))
        if not sizes.sizes:
            return split
        ranks = [_Sizes() for _ in range(tp)]
        runs.ranks(split, ranks)
        per_draw = [
            list(_candidates(whole, [one.sizes[number] for one in ranks], runs.block, split))
            for number, whole in enumerate(sizes.sizes)
        ]
        for draws in islice(product(*per_draw), _MOST_TRIES):
            made = replace(split, draws=draws)
            found = [dict(paths_of(output)) for output in runs.ranks(made, [])]
            if all(path in one and not differ(one[path], expected[path]) for one in found for path in call.read):
                return made
    except (IndexError, RuntimeError, TypeError, ValueError, Fold3dError):
        pass  # ranks that draw otherwise
    return split


class _Runs:
    """Runs a block as in training, whole and as emulated ranks, with equal seeds; large weights as in a proof."""

    def __init__(self, call: CapturedCall, split: BlockSplit, tp: int) -> None:
        self._call, self._split, self._tp = call, split, tp
        self._factors, self._large = Factors(), Factors.candidates(call.block, split.shards)
        self.block = with_weights(call.block, self._large).train()

    def whole(self, mode: PartialDraws) -> Any:
        """Returns what the whole block returns."""
        large = [(name, self.block.get_parameter(name)) for name in self._large]
        args, kwargs = double_inputs(self._call)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), DoubleMode(), self._factors.mode(-1, large, {}), mode:
            torch.manual_seed(_SEED)
            output = self.block(*args, **kwargs)
        unused = set(self._large) - self._factors.used
        if not unused:
            return output
        self._factors, self._large = Factors(), [name for name in self._large if name not in unused]
        self.block = with_weights(self._call.block, self._large).train()
        return self.whole(mode)

    def ranks(self, split: BlockSplit, modes: Sequence[PartialDraws]) -> list[Any]:
        """Returns what each rank's share of the block returns, in a mode of its own if there are any."""
        blocks = [shard_block(self.block, split, rank, self._large) for rank in range(self._tp)]

        def as_rank(ops: EmulatedOps) -> Any:
            mine = blocks[ops.rank]
            install_block(mine, split, ops.rank, ops)
            args, kwargs = double_inputs(self._call)
            with modes[ops.rank] if modes else nullcontext():
                return mine(*args, **kwargs)

        owned = [(rank, name, block.get_parameter(name)) for rank, block in enumerate(blocks) for name in self._large]
        products = self._factors.modes(owned, split.shards)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), DoubleMode(), products:
            torch.manual_seed(_SEED)
            return EmulatedGroup(self._tp).run(as_rank)


def _candidates(whole: Size, parts: Sequence[Size], block: nn.Module, split: BlockSplit) -> Iterator[Draw | None]:
    """Yields how a draw may lie on the ranks, the likeliest first."""
    dims = [dim for dim, size in enumerate(whole) if any(part[dim] != size for part in parts)]
    if not dims:
        yield None
        return
    if len(dims) > 1 or any(len(part) != len(whole) for part in parts):
        return
    (dim,) = dims
    seen: list[Draw] = []
    for times in sorted({1, *whole}):
        length, rest = divmod(whole[dim], times)
        if rest:
            continue
        for channels, of_ranks in _exit_channels(block, split):
            if channels % length:
                continue
            indices = [sorted({channel * length // channels for channel in mine}) for mine in of_ranks]
            if any(len(mine) * times != part[dim] for mine, part in zip(indices, parts, strict=True)):
                continue
            draw = Draw(dim=dim, whole=length, parts=tuple(runs_of(mine) for mine in indices))
            if draw not in seen:
                seen.append(draw)
                yield draw


def _exit_channels(block: nn.Module, split: BlockSplit) -> Iterator[tuple[int, list[list[int]]]]:
    """Yields, of each region's exits, how many input channels there are, and each rank's."""
    for group in split.groups:
        for name in group.exits:
            shard = split.shards.get(f"{name}.weight")
            module = block.get_submodule(name)
            if shard is not None and is_linear(module) and shard.dim == (0 if is_transposed(module) else 1):
                yield shard.size, [[i for first, end in runs for i in range(first, end)] for runs in shard.parts]
