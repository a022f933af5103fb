"""Slices: which indices of a dimension each rank of a tensor-parallel group has; Shard: those of a parameter."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Runs = tuple[tuple[int, int], ...]
"""Pieces [first, end) of a dimension, in the order in which they lie in a rank's part."""


def runs_of(indices: Iterable[int]) -> Runs:
    """Returns indices, in their order, as runs of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return tuple(runs)


def indices_of(runs: Runs, device: torch.device | str = "cpu") -> Tensor:
    """Returns the indices in runs, int64."""
    return torch.cat([torch.arange(first, end, device=device) for first, end in runs] or [torch.arange(0)])


def even_part(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns [first, end) of a rank's part of `size` indices; lengths differ by one at most, the longer ones first."""
    each, more = divmod(size, ranks)
    first = rank * each + min(rank, more)
    return first, first + each + int(rank < more)


@dataclass(frozen=True, slots=True)
class Slices:
    """Which indices of one dimension each rank has.

    A tensor may have a multiple of `size` there: the same indices then lie in it time after time, as where samples and
    heads share a dimension.
    """

    dim: int
    size: int
    """Of the whole dimension, or of one time."""
    parts: tuple[Runs, ...]
    """Per rank of the group."""

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self.parts)

    def length(self, rank: int) -> int:
        """Returns how many indices a rank has."""
        return sum(end - first for first, end in self.parts[rank])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's part of a whole tensor, in memory of its own.

        Raises: ValueError when its dimension is no multiple of `size`.
        """
        index = indices_of(self.parts[rank], whole.device)
        return self._times(whole, self.size).index_select(self.dim + 1, index).flatten(self.dim, self.dim + 1)

    def put(self, whole: Tensor, part: Tensor, rank: int) -> None:
        """Writes a rank's part to its places in a whole tensor, which is contiguous."""
        index = indices_of(self.parts[rank], whole.device)
        self._times(whole, self.size).index_copy_(self.dim + 1, index, self._times(part, len(index)))

    def _times(self, x: Tensor, size: int) -> Tensor:
        if x.shape[self.dim] % size:
            raise ValueError(
                f"a tensor of {tuple(x.shape)} has {x.shape[self.dim]} elements along dimension {self.dim}, which is "
                f"no multiple of {size} as where the model was recorded"
            )
        return x.reshape(*x.shape[: self.dim], -1, size, *x.shape[self.dim + 1 :])


NOT_KNOWN = Slices(dim=0, size=0, parts=())
"""Of what nobody could look at."""


@dataclass(frozen=True, slots=True)
class Shard(Slices):
    """How one parameter is spread over the ranks of a tensor-parallel group.

    A rank holds the pieces `parts[rank]` of dimension `dim`, one after the other in one contiguous parameter. Parts
    need not be equally long, and several ranks may hold the same piece: a replicated parameter is one of which every
    rank holds all. A scalar parameter counts as one of length 1, and is replicated.

    Raises: ValueError when the parts do not cover the dimension, or leave it.
    """

    summed: bool = False
    """Whether ranks with equal parts have different shares of its gradient, which is their sum. False: it is the same
    on each."""

    def __post_init__(self) -> None:
        pieces = sorted({piece for runs in self.parts for piece in runs})
        for first, end in pieces:
            if not 0 <= first < end <= self.size:
                raise ValueError(f"[{first}, {end}) is no piece of a dimension of {self.size}")
        held = 0  # [0, held) is
        for first, end in pieces:
            if first > held:
                break
            held = max(held, end)
        if held < self.size:
            raise ValueError(f"no rank holds index {held} of a dimension of {self.size}")

    @classmethod
    def replicated(cls, shape: Sequence[int], ranks: int, *, summed: bool = False) -> Shard:
        """Returns that of a parameter of this shape which every rank holds whole."""
        size = shape[0] if shape else 1
        return cls(0, size, (((0, size),),) * ranks, summed)

    @classmethod
    def even(cls, dim: int, size: int, ranks: int) -> Shard:
        """Returns consecutive parts whose lengths differ by one at most, the longer ones first."""
        parts = (even_part(size, ranks, rank) for rank in range(ranks))
        return cls(dim, size, tuple(((first, end),) if first < end else () for first, end in parts))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return all(runs == ((0, self.size),) for runs in self.parts)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's part of a parameter of shape `whole`."""
        return () if not whole else (*whole[: self.dim], self.length(rank), *whole[self.dim + 1 :])

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the whole parameter, given that of any rank's part."""
        return () if not part else (*part[: self.dim], self.size, *part[self.dim + 1 :])

    def first_held(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Returns the pieces of a rank's part that no lower rank holds, as (place in the part, first, end).

        Over all ranks they are each index of the dimension once: a sum or a copy of the whole is made of these.
        """
        lower = sorted(run for runs in self.parts[:rank] for run in runs)
        pieces: list[tuple[int, int, int]] = []
        position = 0
        for start, end in self.parts[rank]:
            first = start
            for low, high in (*lower, (end, end)):
                if first < min(low, end):
                    pieces.append((position + first - start, first, min(low, end)))
                first = max(first, high)
            position += end - start
        return tuple(pieces)

    def holders(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks whose part equals that of `rank`, itself among them, ascending."""
        return tuple(other for other, runs in enumerate(self.parts) if runs == self.parts[rank])

    def copies(self, rank: int) -> list[int]:
        """Returns of each index of a rank's part how many ranks hold it."""
        counts = [0] * self.size
        for first, end, count in self._held():
            counts[first:end] = [count] * (end - first)
        return [count for first, end in self.parts[rank] for count in counts[first:end]]

    @property
    def overlaps(self) -> bool:
        """Whether two ranks hold some of the same indices, but not the same part: such as a fused projection of sharded
        queries and shared keys. The gradient of what several hold is then made equal in each backward, never later."""
        held = self._held()
        starts = [first for first, _, _ in held]
        alike = Counter(self.parts)
        return any(
            count != ranks
            for runs, ranks in alike.items()
            for first, end in runs
            for _, _, count in held[bisect_right(starts, first) - 1 : bisect_left(starts, end)]
        )

    def _held(self) -> list[tuple[int, int, int]]:
        """Returns pieces of the dimension as (first, end, how many ranks hold it), ascending; together they are all."""
        changes: Counter[int] = Counter()
        for runs in self.parts:
            for first, end in runs:
                changes[first] += 1
                changes[end] -= 1
        edges = sorted(changes)
        counts = accumulate(changes[edge] for edge in edges)
        return [(first, end, count) for (first, end), count in zip(pairwise(edges), counts, strict=False)]

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's part of a whole tensor, in memory of its own."""
        if not whole.dim():
            return whole.clone()
        pieces = [whole.narrow(self.dim, first, end - first) for first, end in self.parts[rank]]
        if not pieces:
            return whole.narrow(self.dim, 0, 0).clone()
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def copy_to_part(self, part: Tensor, whole: Tensor, rank: int) -> None:
        """Fills a rank's part from a whole tensor; their dtypes and devices may differ."""
        position = 0
        part, whole = _with_dimension(part), _with_dimension(whole)
        for first, end in self.parts[rank]:
            part.narrow(self.dim, position, end - first).copy_(whole.narrow(self.dim, first, end - first))
            position += end - first

    def put(self, whole: Tensor, part: Tensor, rank: int) -> None:
        """Writes a rank's part to its places in a whole tensor."""
        position = 0
        part, whole = _with_dimension(part), _with_dimension(whole)
        for first, end in self.parts[rank]:
            whole.narrow(self.dim, first, end - first).copy_(part.narrow(self.dim, position, end - first))
            position += end - first


def _with_dimension(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)
