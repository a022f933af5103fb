"""TreeGroup: collectives of small values, whose connections per process do not grow with the number of ranks; Tree: who
meets whom in them; Family: ranks that are directly connected.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.utils._pytree import tree_map_only

from fold3d.comms import abortable_collectives
from fold3d.comms.shared_gloo import connect_few
from fold3d.faults.progress import Progress


class Family:
    """Some ranks with gloo connections of their own, each with each; the first of them is the top.

    All of them construct it and make the same calls in the same order. What is sent is bytes in host memory.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, timeout: float):
        """Args:
        ranks: in the job, two or more, with `rank`, this process's, among them.
        name: the same for all of them, given to no other family of the job's store.
        timeout: seconds until a rank that does not come is an error.
        Raises: DistNetworkError when one does not come.
        """
        self._ranks, self._own = list(ranks), list(ranks).index(rank)
        self._waits = False  # a call that was given up is still under way
        self._group: Any = None
        try:
            self._group = connect_few(name, self._own, len(ranks), timedelta(seconds=timeout))
        except RuntimeError as error:
            raise dist.DistNetworkError(f"{self._others()} did not connect within {timeout:g} s: {error}") from error
        # gloo is done with this rank before the others are done with it: one that closes at once would fail them.
        self.sizes(0, timeout, Progress())

    def gather(self, block: Tensor, timeout: float, progress: Progress) -> list[Tensor]:
        """Returns everybody's `block`, uint8 and of one size, in the order of the ranks, at the top; else nothing."""
        options = dist.GatherOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=timeout)
        blocks = [torch.empty_like(block) for _ in self._ranks] if self._own == 0 else []
        self._finish(lambda: self._group.gather([blocks] if blocks else [], [block], options), timeout, progress)
        return blocks

    def sizes(self, size: int, timeout: float, progress: Progress) -> list[int]:
        """Returns everybody's `size`, in the order of the ranks, to all."""
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        found = [torch.empty(1, dtype=torch.int64) for _ in self._ranks]
        self._finish(lambda: self._group.allgather([found], [torch.tensor([size])], options), timeout, progress)
        return [int(one) for one in found]

    def spread(self, block: Tensor, timeout: float, progress: Progress, source: int = 0) -> None:
        """Fills everybody's `block`, uint8 and of one size, with that of the rank at place `source`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, timedelta(seconds=timeout)
        self._finish(lambda: self._group.broadcast([block], options), timeout, progress)

    def send(self, data: Tensor, timeout: float) -> Callable[[], None]:
        """Sends `data`, uint8 and at least one, to the top alone; returns what waits until it has left."""
        return self._waiting(self._group.send([data], 0, 0), 0, timeout)

    def receive(self, data: Tensor, source: int, timeout: float) -> None:
        """Fills `data` with what the rank at place `source` sends to this one, the top; waits for it."""
        self._waiting(self._group.recv([data], source, 0), source, timeout)()

    def _waiting(self, work: Any, other: int, timeout: float) -> Callable[[], None]:
        def wait() -> None:
            try:
                work.wait(timedelta(seconds=timeout))
            except RuntimeError as error:
                raise dist.DistNetworkError(
                    f"rank {self._ranks[other]} cannot be reached, or did not come within {timeout:g} s (gloo: {error})"
                ) from error

        return wait

    def close(self) -> None:
        """Ends the connections; does nothing the second time."""
        group, self._group = self._group, None
        if group is not None and self._waits:
            # Nothing ends the thread before its time limit, and whoever destroys the group waits for the thread.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def __del__(self) -> None:
        self.close()

    def _finish(self, start: Callable[[], Any], timeout: float, progress: Progress) -> None:
        self._waits = True
        try:
            abortable_collectives.finish(start(), progress)
        except RuntimeError as error:
            if progress.life.failure is not None:
                raise
            raise dist.DistNetworkError(
                f"{self._others()} cannot be reached, or did not come within {timeout:g} s (gloo: {error})"
            ) from error
        self._waits = False

    def _others(self) -> str:
        others = [rank for place, rank in enumerate(self._ranks) if place != self._own]
        return f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {others}"


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the elements of `tensor` as a flat uint8 tensor: [number of elements * element size]."""
    dense = tensor.detach().contiguous()
    # Not reshape(-1): of one element, which counts as contiguous with any strides, it keeps them.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


FAN_OUT = 4
"""Members below a member. More of them: fewer levels, more connections per process."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree over the members 0 ... size - 1. A subtree is a range of them that begins with its top.

    A member meets two families: its children and itself, and its siblings and parent. In a family all are connected.
    """

    size: int
    fan_out: int = FAN_OUT

    def parent(self, member: int) -> int | None:
        """Returns the member above, None for member 0."""
        return self._find(member)[0]

    def subtree(self, member: int) -> range:
        """Returns `member` and all below it."""
        return self._find(member)[1]

    def children(self, member: int) -> list[int]:
        """Returns the members directly below, in ascending order."""
        return [part.start for part in self._parts(self.subtree(member))]

    def family(self, member: int) -> list[int]:
        """Returns `member` and its children."""
        return [member, *self.children(member)]

    def _parts(self, span: range) -> list[range]:
        """Returns the subtrees directly below the top of the subtree `span`, as equal as can be."""
        below = len(span) - 1
        count = min(self.fan_out, below)
        bounds = [span.start + 1 + below * k // count for k in range(count + 1)] if count else []
        return [range(start, stop) for start, stop in itertools.pairwise(bounds)]

    def _find(self, member: int) -> tuple[int | None, range]:
        if not 0 <= member < self.size:
            raise ValueError(f"member {member} is outside a tree of {self.size}")
        above, span = None, range(self.size)
        while span.start != member:
            above = span.start
            span = next(part for part in self._parts(span) if member in part)
        return above, span


Combine = Callable[[Tensor, Tensor], Tensor]
"""Of two tensors of one shape and dtype, element by element."""
_LIBRARY_OPS: dict[Combine, Any] = {torch.add: dist.ReduceOp.SUM, torch.maximum: dist.ReduceOp.MAX}
"""Those that a library for device memory has, too."""


class TreeGroup:
    """An ordered list of ranks that exchange small values over a `Tree`: up to its first member, and down again.

    All of them construct it and make the same calls in the same order. Sums have one order, that of the tree: a
    member's own value, then the sums of the subtrees below it, in ascending order. What comes down is the first
    member's, so all have the same bits. Tensors go through host memory, unless `use_library` was called for theirs.

    A wait ends after `timeout` seconds, and within a moment when `progress` is told of a failure: methods raise
    DistNetworkError then, and when a rank cannot be reached.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        name: str,
        *,
        patience: float,
        timeout: float,
        progress: Progress,
        tree: Tree | None = None,
    ):
        """Args:
        ranks: in the job, with `rank`, this process's, among them.
        name: the same for all members, given to no other group of the job's store.
        patience: seconds until a member that does not construct it is an error.
        """
        self.ranks = list(ranks)
        self.index = self.ranks.index(rank)
        self.timeout, self.progress = timeout, progress
        self.tree = tree or Tree(len(self.ranks))
        self._library: Any = None
        """Process group of the same ranks for tensors in device memory, once there is one."""
        above = self.tree.parent(self.index)
        self._above = None if above is None else self._meet(above, rank, name, patience)
        self._below = self._meet(self.index, rank, name, patience) if self.tree.children(self.index) else None

    @property
    def library(self) -> Any:
        """torch's group by which tensors on devices are sent; None: through host memory."""
        return self._library

    def use_library(self, group: Any) -> None:
        """Tensors on devices are sent by torch's `group` of the same ranks from now on, with None through host memory;
        all members call."""
        self._library = group

    def _meet(self, top: int, rank: int, name: str, patience: float) -> Family:
        return Family([self.ranks[member] for member in self.tree.family(top)], rank, f"{name}/{top}", patience)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first member."""
        return self.index == 0

    # Up

    def reduce(self, tensor: Tensor, combine: Combine = torch.add, *, timeout: float | None = None) -> Tensor:
        """Returns the combination of everybody's `tensor`, in host memory, to the first member; a part to others."""
        total = tensor.detach().cpu().clone()
        if self._below is not None:
            for block in self._below.gather(as_bytes(total), self._limit(timeout), self.progress)[1:]:
                total = combine(total, block.view(total.dtype).reshape(total.shape))
        if self._above is not None:
            self._above.gather(as_bytes(total), self._limit(timeout), self.progress)
        return total

    def gather(self, value: Any, *, timeout: float | None = None) -> list[Any] | None:
        """Returns everybody's `value`, anything that pickles, in their order to the first member, None to others."""
        shares = [pickle.dumps(value)]
        if self._below is not None:
            for packed in self._collect(self._below, b"", timeout)[1:]:
                shares += pickle.loads(packed)
        if self._above is not None:
            self._collect(self._above, pickle.dumps(shares), timeout)
        return [pickle.loads(share) for share in shares] if self.is_first else None

    def _collect(self, family: Family, packed: bytes, timeout: float | None) -> list[bytes]:
        limit = self._limit(timeout)
        sizes = family.sizes(len(packed), limit, self.progress)
        block = torch.zeros(max(sizes), dtype=torch.uint8)
        block[: len(packed)] = _tensor(packed)
        blocks = family.gather(block, limit, self.progress)
        return [bytes(block[:size].numpy()) for block, size in zip(blocks, sizes, strict=False)]

    def is_above(self, source: int) -> bool:
        """Whether what member `source` has comes by here on its way to the first member, or begins here."""
        return source in self.tree.subtree(self.index)

    def pass_up(self, data: Tensor, source: int, *, timeout: float | None = None) -> Callable[[], None]:
        """Brings `data`, bytes in host memory and at least one, from member `source` to the first, which has room for
        it as those between them have; only those for whom `is_above(source)` holds call. Returns what waits until
        `data` has left again."""
        if source != self.index and self._below is not None:
            self._below.receive(data, self._nearest(self.index, source), self._limit(timeout))
        if self._above is None:
            return lambda: None
        return self._above.send(data, self._limit(timeout))

    # To all

    def broadcast(self, tensor: Tensor, source: int = 0, *, timeout: float | None = None) -> None:
        """Fills everybody's `tensor` with that of member `source`."""
        if self.size == 1 or tensor.numel() == 0:
            return
        if self._library is not None and tensor.device.type != "cpu":
            dist.broadcast(tensor, self.ranks[source], group=self._library)
            return
        host = tensor.detach().cpu()
        block = as_bytes(host)
        self._spread(block, source, timeout)
        if self.index != source and (block.data_ptr() != tensor.data_ptr()):
            tensor.detach().copy_(block.view(host.dtype).reshape(host.shape))

    def share(self, value: Any, source: int = 0, *, timeout: float | None = None) -> Any:
        """Returns the `value` of member `source`, anything that pickles; others' are ignored."""
        if self.size == 1:
            return value
        has_it = self.index == source
        packed = _tensor(pickle.dumps(value)) if has_it else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([packed.numel()])
        self._spread(as_bytes(size), source, timeout)
        block = packed if has_it else torch.empty(int(size), dtype=torch.uint8)
        self._spread(block, source, timeout)
        return value if has_it else pickle.loads(bytes(block.numpy()))

    def _spread(self, block: Tensor, source: int, timeout: float | None) -> None:
        """Fills everybody's `block` with that of member `source`, from family to family."""
        families = [(self._above, self.tree.parent(self.index)), (self._below, self.index)]
        # First where it comes from: from above, unless `source` is below.
        for family, top in reversed(families) if self.is_above(source) else families:
            if family is not None and top is not None:
                family.spread(block, self._limit(timeout), self.progress, self._nearest(top, source))

    def _nearest(self, top: int, source: int) -> int:
        """Returns the place, in the family of `top`, of the member by which what `source` has comes there."""
        children = enumerate(self.tree.children(top), 1)
        return next((place for place, child in children if source in self.tree.subtree(child)), 0)

    # Up and down

    def all_reduce(self, tensor: Tensor, combine: Combine = torch.add, *, timeout: float | None = None) -> None:
        """Combines everybody's `tensor`, in place. On a device, if `use_library` was called and the library has
        `combine` (sums and maxima), by it and in its order, and the host does not wait."""
        op = _LIBRARY_OPS.get(combine)
        if self.size > 1 and self._library is not None and op is not None and tensor.device.type != "cpu":
            dist.all_reduce(tensor.detach(), op, group=self._library)
        elif self.size > 1:
            total = self.reduce(tensor, combine, timeout=timeout)
            self.broadcast(total, timeout=timeout)
            tensor.detach().copy_(total)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns everybody's `tensor`, all of one shape and dtype, in their order, on its device."""
        if self.size == 1:
            return [tensor.detach().clone()]
        if self._library is not None and tensor.device.type != "cpu":
            shares = [torch.empty_like(tensor) for _ in self.ranks]
            dist.all_gather(shares, tensor.contiguous(), group=self._library)
            return shares
        own = as_bytes(tensor.detach().cpu())
        whole = torch.empty((self.size, own.numel()), dtype=torch.uint8)
        if own.numel():
            self._fill(whole, own)
            self._spread(whole.reshape(-1), 0, None)
        return [row.view(tensor.dtype).reshape(tensor.shape).to(tensor.device) for row in whole]

    def _fill(self, whole: Tensor, own: Tensor) -> None:
        """Brings everybody's `own` into the first member's `whole`; a subtree is a range of its rows."""
        limit = self._limit(None)
        whole[self.index] = own
        if self._below is not None:
            children = self.tree.children(self.index)
            blocks = self._below.gather(self._rows(self.index, whole), limit, self.progress)
            for child, block in zip(children, blocks[1:], strict=True):
                rows = self.tree.subtree(child)
                whole[rows.start : rows.stop] = block.view(-1, own.numel())[: len(rows)]
        parent = self.tree.parent(self.index)
        if self._above is not None and parent is not None:
            self._above.gather(self._rows(parent, whole), limit, self.progress)

    def _rows(self, top: int, whole: Tensor) -> Tensor:
        """Returns this member's subtree in a block of the one size that the family of `top` has."""
        most = max(len(self.tree.subtree(child)) for child in self.tree.children(top))
        rows = self.tree.subtree(self.index)
        block = torch.zeros((most, whole.shape[1]), dtype=torch.uint8)
        if self.index != top:  # the top's own is not looked at
            block[: len(rows)] = whole[rows.start : rows.stop]
        return block.reshape(-1)

    def close(self) -> None:
        """Ends the connections."""
        for family in (self._above, self._below):
            if family is not None:
                family.close()
        self._above = self._below = None

    def _limit(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class _TensorHere:
    """Stands for a tensor that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def broadcast_value(value: Any, source: int, group: TreeGroup) -> Any:
    """Returns member `source`'s `value` to all members of `group`; all of them call.

    Args:
        value: any nesting that torch.utils._pytree knows, with tensors and picklable values; others' are ignored.
    """
    is_source = group.index == source
    tensors: list[torch.Tensor] = []

    def describe(tensor: torch.Tensor) -> _TensorHere:
        # A conjugate or negative view has other bits in memory than its values.
        tensors.append(tensor.detach().resolve_conj().resolve_neg().contiguous())
        return _TensorHere(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    header = group.share(tree_map_only(torch.Tensor, describe, value) if is_source else None, source)
    if is_source:
        for tensor in tensors:
            group.broadcast(tensor, source)
        return value

    def receive(described: _TensorHere) -> torch.Tensor:
        device = torch.device(described.device_type)
        tensor = torch.empty(described.shape, dtype=described.dtype, device=device)
        group.broadcast(tensor, source)
        return tensor

    return tree_map_only(_TensorHere, receive, header)
