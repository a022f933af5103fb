"""BlockSequence: the exchanges of a block whose ranks share the sequence of its hidden state; SequenceLength: how
long the whole one is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fold3d import seeding
from fold3d._C import have_drawn
from fold3d.errors import Fold3dError
from fold3d.sharding.shard import even_part
from fold3d.sharding.split import Gathering, Path, SequenceSplit
from fold3d.tensor_parallel.block_call import BlockCall, BlockCalls
from fold3d.tensor_parallel.checkpoints import CheckpointMemory
from fold3d.tensor_parallel.linear import factor, is_fusable
from fold3d.tensor_parallel.operators import of_fold3d
from fold3d.tensor_parallel.random_draws import Chances, RowsRandom
from fold3d.tensor_parallel.region import Exchange, FusedOps, RegionOps
from fold3d.tensor_parallel.slices import replace_argument, replace_leaf
from fold3d.tensor_parallel.whole_results import LazyWhole, is_behind_blocks
from fold3d.torch_private import StorageLabels, in_backward
from fold3d.trace.coat import Coat, Wrap

logger = logging.getLogger(__name__)
_told: set[str] = set()
"""Of which blocks it was said that they begin to draw."""


class SequenceLength:
    """Of the blocks that hand parts of a hidden state to each other; it may differ from one forward to the next.

    A part alone does not say it: sequences of 7 and of 8 both give the first of two ranks 4 rows. Every forward of the
    model begins with the first of these blocks, on every stage, so it is noted there. Where backward runs an activation
    checkpoint again, it is that of the forward of the checkpoint: of the same frame, or, in a reentrant one, which has
    none, of the forward that was given the same memory.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank
        self._now: int | None = None
        self._memory = CheckpointMemory()
        self._given = StorageLabels[int]()
        self._by_rows: dict[int, set[int]] = {}

    def begin(self, length: int) -> None:
        """The first of the blocks was called with a whole hidden state of this length."""
        self._now = length
        first, end = even_part(length, self._size, self._rank)
        self._by_rows.setdefault(end - first, set()).add(length)

    def of(self, rows: int | None = None, *, given: Tensor | None = None, known: int | None = None) -> int:
        """Returns the length.

        Args:
            rows: of this rank's part, where the caller has one.
            given: what a block was given of the hidden state.
            known: the length of the call of a block in which the caller runs; None outside of one.
        Raises: Fold3dError when a part of a block in a reentrant checkpoint runs again and sequences of several lengths
            were seen.
        """
        return self._memory.recall(None, lambda: self._found(rows, given, known))

    def _found(self, rows: int | None, given: Tensor | None, known: int | None) -> int:
        """Does what `of` does where no checkpoint knows."""
        if not in_backward():
            if self._now is None:
                raise Fold3dError("a block ran before the first one of the model, which is given the whole sequence")
            if given is not None and not torch.is_grad_enabled():  # in a reentrant checkpoint, maybe
                self._given[given] = self._now
            return self._now
        if known is not None:
            return known
        if given is not None and (kept := self._given.get(given)) is not None:
            return kept
        lengths = set().union(*self._by_rows.values()) if rows is None else self._by_rows.get(rows, set())
        if len(lengths) != 1:
            raise Fold3dError(
                "backward runs a part of a block in a reentrant torch.utils.checkpoint again, which does not say how "
                f"long its sequence was ({', '.join(map(str, sorted(lengths)))}); pass use_reentrant=False to "
                "checkpoint, set recompute=True instead, or sequence_parallel=False"
            )
        return next(iter(lengths))


class BlockSequence:
    """What the forwards of one block do with parts of the sequence. All ranks of the group call the same."""

    def __init__(
        self,
        block: nn.Module,
        split: SequenceSplit,
        length: SequenceLength,
        ops: RegionOps,
        calls: BlockCalls,
    ) -> None:
        self.split = split
        self._block, self._length, self._ops, self._calls = block, length, ops, calls
        self._chances = Chances(block)

    def watch(self, coat: Coat) -> None:
        """Does what there is to do also where something stands in for the block's own forward, as on another stage:
        before each call of the first block it is noted how long the whole sequence is, and what each but the last
        returns is handed on.
        """
        if self.split.begins:
            coat.put(Wrap.LENGTH, self._block, self.begin)
        if not self.split.ends:
            coat.put(Wrap.HANDED, self._block, lambda _module, _args, output: self.hand_on(output))

    def begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """The block, the first of those that hand parts to each other, is called with a whole hidden state."""

        def note(x: Tensor) -> Tensor:
            self._length.begin(x.shape[self.split.dim])
            return x

        replace_argument(args, kwargs, self.split.hidden, note)

    def scatter(self, call: BlockCall, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the block's arguments with this rank's part of the hidden state; the model's own code may have made
        it of whole ones."""
        dim, begins = self.split.dim, self.split.begins

        def given(x: Tensor) -> Tensor:
            x = x.latest() if isinstance(x, LazyWhole) else x
            length = x.shape[dim] if begins else self._length.of(x.shape[dim], given=x)
            call.begin(x.shape[0], length)
            first, end = even_part(length, self._ops.size, self._ops.rank)
            is_part = not begins and x.shape[dim] == end - first
            return x if is_part else self._ops.exchange(x, Exchange.scatter(dim, length))

        return replace_argument(args, kwargs, self.split.hidden, given)

    def hand_on(self, output: Any) -> Any:
        """Returns the block's result as the model's code and later blocks take it: that of the last one has the whole
        hidden state, that of others what stands for it, unless it does already."""
        if self.split.ends:
            return replace_leaf(output, self.split.result, self.whole)
        if is_behind_blocks() or in_backward():  # whole, or computed again for gradients
            return output

        def lazily(part: Tensor) -> Tensor:
            if isinstance(part, LazyWhole):
                return part
            length = self._length.of()  # now: it may be read when another batch has run
            return LazyWhole.of(part, partial(self._whole, sums=False, folded=False, length=length))

        return replace_leaf(output, self.split.result, lazily)

    def whole(self, part: Tensor) -> Tensor:
        """Returns the whole of which each rank has a part; its gradient is the same on each."""
        return self._whole(part, sums=False, folded=False)

    def whole_folded(self, part: Tensor) -> Tensor:
        """Does what `whole` does where samples and their sequences lie in one dimension, the first."""
        return self._whole(part, sums=False, folded=True)

    @of_fold3d()
    def leave(self, y: Tensor) -> Tensor:
        """Returns this rank's part of the sum of what an exit returns. Raises: ValueError when it has no sequence."""
        unfolded, folded = self._of_an_exit(y)
        dim, length = self.split.dim, unfolded.shape[self.split.dim]
        part = self._ops.exchange(unfolded, Exchange.reduce_scatter(dim, length))
        return part.flatten(0, 1) if folded else part

    def leave_product(self, fused: FusedOps, x: Tensor, weight: Tensor) -> Tensor:
        """Does what `leave` does for the product of `x` and a weight, [in, out]."""
        unfolded, folded = self._of_an_exit(x)
        part = fused.matmul_reduce_scatter(unfolded, weight, self.split.dim)
        return part.flatten(0, 1) if folded else part

    def gather(self, coat: Coat, one: Gathering, linear: Collection[str] = ()) -> None:
        """Has a module take the whole sequence.

        Args:
            linear: layers that take a product which is computed already (`BlockCall.product`).
        """
        module, calls = self._block.get_submodule(one.module), self._calls
        readers = {name: self._block.get_submodule(name) for name in one.readers if name in linear}
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = calls.current()

            def gathered(x: Tensor) -> Tensor:
                return call.gather(
                    x, one.sums, lambda x: self._whole(x, sums=one.sums, folded=one.folded, call=call, readers=readers)
                )

            args, kwargs = replace_argument(args, kwargs, one.path, gathered)
            return original(*args, **kwargs)

        coat.put(Wrap.GATHERED, module, forward)

    @contextlib.contextmanager
    def random(self, in_region: Callable[[], bool], args: Any, kwargs: Any, *, region_draws: bool) -> Iterator[None]:
        """Outside of regions, what the block draws is this rank's part of what one rank would draw.

        Args:
            region_draws: whether regions draw from the same generators; else from copies of them, if they do.
        """
        chances = self._chances.now()
        hidden = _leaf(args, kwargs, self.split.hidden)
        if hidden is None:
            yield
            return
        if self._chances.draw_nothing(chances) and not region_draws:
            generators = seeding.generators_of(hidden.device)
            name, before = type(self._block).__name__, have_drawn(generators)  # before: of what is in front of it
            yield
            if not before and have_drawn(generators) and name not in _told:
                _told.add(name)  # what runs again in backward must draw what it drew: it stays so
                logger.warning(
                    "%s begins to draw random numbers, which it did not before: with sequence_parallel each rank draws "
                    "its own from now on, not those of one process; set sequence_parallel=False for these",
                    name,
                )
            return
        length, _ = self._known(hidden.shape[self.split.dim])
        mode = RowsRandom(hidden.shape, self.split.dim, length, self._ops.size, self._ops.rank, in_region)
        with mode:
            yield
        self._chances.note(chances, drawn=mode.used)

    @of_fold3d()
    def _whole(
        self,
        part: Tensor,
        *,
        sums: bool,
        folded: bool,
        length: int | None = None,
        call: BlockCall | None = None,
        readers: Mapping[str, nn.Module] | None = None,
    ) -> Tensor:
        dim, samples = self.split.dim, None
        if length is None:
            length, samples = self._known(None if folded else part.shape[dim])
        first, end = even_part(length, self._ops.size, self._ops.rank)
        unfolded = _unfolded(part, end - first, samples) if folded else part
        fused = self._ops.fused if readers and all(is_fusable(one, part) for one in readers.values()) else None
        if fused is not None and call is not None and readers:
            weights = [factor(one) for one in readers.values()]
            whole, products = fused.all_gather_matmul(unfolded, weights, dim, length)
            if folded:
                whole, products = whole.flatten(0, 1), [one.flatten(0, 1) for one in products]
            call.add_products(whole, dict(zip(readers, products, strict=True)))
            return whole
        whole = self._ops.exchange(unfolded, Exchange.gather(dim, length, sums=sums))
        return whole.flatten(0, 1) if folded else whole

    def _of_an_exit(self, x: Tensor) -> tuple[Tensor, bool]:
        """Returns the whole sequences that an exit takes or returns, and whether samples and sequences lay in one
        dimension, as some models have it around linear layers, or experts return tokens."""
        dim, (length, _) = self.split.dim, self._known(None)
        folded = dim == 1 and x.dim() == 2
        unfolded = _unfolded(x, length) if folded else x
        if unfolded.dim() <= dim or unfolded.shape[dim] != length:
            raise ValueError(f"an exit has {tuple(x.shape)}, in which dimension {dim} is no sequence of {length}")
        return unfolded, folded

    def _known(self, rows: int | None) -> tuple[int, int | None]:
        """Returns how long the whole sequence is, and how many samples there are, where that was said."""
        samples, length = self._calls.current().given or (None, None)
        return self._length.of(rows, known=length), samples


def _unfolded(x: Tensor, rows: int, samples: int | None = None) -> Tensor:
    """Returns [samples * rows, ...] as [samples, rows, ...]. Raises: ValueError where that is not possible.

    Args:
        samples: how many there are, which nothing else says where this rank's parts have no rows.
    """
    if not rows and samples is not None and not x.shape[0]:
        return x.reshape(samples, 0, *x.shape[1:])
    if not rows or x.shape[0] % rows:
        raise ValueError(f"{tuple(x.shape)} holds no samples of {rows} rows each")
    return x.reshape(x.shape[0] // rows, rows, *x.shape[1:])


def _leaf(args: Any, kwargs: Any, path: Path) -> Tensor | None:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    replace_argument(args, kwargs, path, note)
    return found[0] if found else None
