"""Trace: what one recorded forward says about a model: its blocks, what lies around them, and where it may be
cut.

Words used here. A block is one run of a module: one that runs several times, with the same weights each time, is as
many blocks of the same name. Blocks are numbered 0 .. n-1 in execution order. Region k (0 <= k < n) is everything that
runs after block k-1 has returned until block k has returned; region n is everything after the last block.
Border k (1 <= k < n) lies between block k-1 and region k: a chunk that starts at block k receives what crosses that
border (see `crossing`) and runs region k itself. A stack is a list of blocks that one module holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fold3d.errors import TraceError
from fold3d.trace.arguments import Form
from fold3d.trace.compound import bytes_of
from fold3d.trace.hooked_results import HookedCall
from fold3d.trace.known_values import NONE, Decisions
from fold3d.trace.module_results import Crossing, Crossings, TreeStructure, Value


def stack_of(block: str) -> str:
    """Returns the name of the module that holds a block."""
    return block.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """Size of a block, or of everything before the first or after the last block."""

    name: str
    """Module name of the block, or "prologue" or "epilogue"."""
    parameters: int
    """Number of parameter elements (a tensor with several names counts once)."""
    flops: int
    """Floating-point operations of one forward of the recorded example (a multiply-add counts as two)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One recorded forward of a model; see `fold3d.trace.trace`. Holds names and numbers, no tensors."""

    blocks: tuple[str, ...]
    """Module names of the blocks, execution order; that of a module that runs several times as often."""
    prologue: tuple[str, ...]
    """Top-most modules outside the blocks that run before the first block, execution order."""
    epilogue: tuple[str, ...]
    """The same after the last block. A module that runs on both sides is in both."""
    between: tuple[str, ...]
    """The same between two blocks."""
    around: tuple[tuple[str, ...], ...]
    """The same of each region (length: blocks + 1)."""
    shared: tuple[str, ...]
    """Parameters that code outside of any block or prologue module reads (such as those held directly by the
    model):
    every chunk owns them."""
    direct: tuple[str, ...]
    """Parameters that code outside of the modules that hold them reads, anywhere; by one of their names."""
    uses: tuple[tuple[str, ...], ...]
    """Names of the parameters that each region needs (length: blocks + 1), in the model's order. A parameter that
    nothing reads is where the model's order says (see `regions_of`)."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of names that are one tensor; the first is the canonical name."""
    structures: tuple[TreeStructure, ...]
    """What each block returns."""
    shapes: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]
    """(shape, dtype) of each tensor that each block returned for the recorded example."""
    modified: tuple[bool, ...]
    """Per block: later code writes into the returned tensors in place, so a receiver must work on a copy."""
    borders: tuple[str, ...]
    """Per border (length: blocks; entry 0 is the model's start and always free): empty if the model may be
    cut there,
    else the reason why not."""
    crossings: tuple[Crossings, ...]
    """Per border (length: blocks; entry 0 is empty): what is made before it and read after it."""
    hooked: tuple[tuple[HookedCall, ...], ...]
    """Of each block the calls of modules inside of it whose results hooks saw; none where nobody reads any of them."""
    costs: tuple[BlockCost, ...]
    """Size of each block."""
    prologue_cost: BlockCost
    epilogue_cost: BlockCost
    head_border: str = ""
    """Of the border behind the last block, as in `borders`: why what lies behind it cannot run by itself."""
    head_crossings: Crossings = ()
    """As in `crossings`: what is made before that border and read behind it."""
    leaks: tuple[str, ...] = ()
    """What is read of blocks otherwise than by the code behind them up to the next one, from what they returned."""
    unread: tuple[str, ...] = ()
    """Parameters that nothing reads in the recorded call."""
    form: Form = ()
    """Of the recorded call."""
    kept: tuple[str, ...] = ()
    """Attributes in which modules keep tensors of a forward, for whoever reads them."""
    kept_of: tuple[int, ...] = ()
    """Of each of them the first block whose results it has, itself or computed from; the number of blocks where it has
    none."""
    behind: tuple[str, ...] = ()
    """Attributes and buffers of modules around the blocks whose tensors, also those in containers, the last block, or
    code behind it, makes or writes; attributes that are numbers, text, None or containers which code behind it changes.
    """
    not_behind: tuple[str, ...] = field(default=(), repr=False)
    """Entries of such dictionaries of which that is not so, as `cache['tables']`."""
    skipped: tuple[str, ...] = ()
    """Blocks of stacks of which others run that did not run in the recorded call: nothing reads their parameters."""
    converted: tuple[tuple[str, torch.dtype], ...] = ()
    """Parameters, by each name, that modules convert to another dtype in the forward, and what that is."""
    draws: bool = False
    """Whether code from the first block on draws from Python's or numpy's generators: chunks run parts of it."""
    decisions: Decisions = field(default=NONE, compare=False, repr=False)
    """By which values of the batch the forward decided what to do: it holds for batches that decide alike."""
    calls: tuple[int, ...] = field(init=False, compare=False)
    """Of each block, how many before it are runs of the same module."""
    tp: int = 1
    """How many ranks share each block where the model is cut; borders and crossings are theirs."""

    def __post_init__(self) -> None:
        seen = Counter[str]()
        calls: list[int] = []
        for name in self.blocks:
            calls.append(seen[name])
            seen[name] += 1
        object.__setattr__(self, "calls", tuple(calls))

    def parameter_bytes(self, model: nn.Module) -> dict[str, int]:
        """Returns the bytes of each parameter of `model`, the one recorded, in the dtype in which it is trained."""
        converted = dict(self.converted)
        return {
            name: p.numel() * converted[name].itemsize if name in converted else bytes_of(p)
            for name, p in model.named_parameters()
        }

    @property
    def modules(self) -> tuple[str, ...]:
        """The names in `blocks`, each once."""
        return tuple(dict.fromkeys(self.blocks))

    @property
    def repeats(self) -> bool:
        """Whether any block runs several times."""
        return len(self.modules) < len(self.blocks)

    def result(self, block: int, tensor: int) -> Value:
        """Returns a tensor of what a block returns."""
        return Value(self.blocks[block], self.calls[block], tensor)

    @property
    def stacks(self) -> tuple[tuple[int, int], ...]:
        """[first, end) block of each run of blocks of one stack."""
        starts = [k for k, name in enumerate(self.blocks) if not k or stack_of(name) != stack_of(self.blocks[k - 1])]
        return tuple(zip(starts, [*starts[1:], len(self.blocks)], strict=True))

    def under(self, tp: int) -> Trace:
        """Returns the recording as it may be cut where `tp` ranks share each block.

        Stages then exchange what the block right before a cut returns, all of it: by themselves no blocks or modules
        that are left out say of what shapes their results are, with parts of their weights installed.
        """
        if tp == 1:
            return self
        crossings = tuple(self._with_all_of_last(border) for border in range(len(self.blocks)))
        whole = replace(self, crossings=crossings, tp=tp)
        return replace(whole, borders=tuple(whole._closed(border) for border in range(len(self.blocks))))

    def _with_all_of_last(self, border: int) -> Crossings:
        found = self.crossings[border]
        if not border:
            return found
        there = {value for one in found for value in one.values}
        unread = (
            Crossing(values=(self.result(border - 1, tensor),), shape=shape, dtype=dtype, modified=False)
            for tensor, (shape, dtype) in enumerate(self.shapes[border - 1])
            if self.result(border - 1, tensor) not in there
        )
        return (*found, *unread)

    def _closed(self, border: int) -> str:
        """Returns why the model cannot be cut at the border by tensor-parallel ranks; "" where it can."""
        if self.borders[border] or not border:
            return self.borders[border]
        if self.repeats:
            again = next(name for name, call in zip(self.blocks, self.calls, strict=True) if call)
            return f"with tp={self.tp} no model can be cut whose blocks run several times, as '{again}' does"
        if len(self.stacks) > 1:
            stacks = ", ".join(dict.fromkeys(stack_of(self.blocks[first]) for first, _ in self.stacks))
            return f"with tp={self.tp} only models with one stack of blocks can be cut, and this has several ({stacks})"
        last = self.blocks[border - 1]
        for one in self.crossings[border]:
            if not any(value.module == last for value in one.values):
                return (
                    f"it lies between '{one.values[0].module}' and who reads its result later, and with tp={self.tp} "
                    "only what the block right before a cut returns can cross it"
                )
        first = self.alike_from(border)
        if first:
            return (
                f"with tp={self.tp} all blocks before it must return the like of what '{last}' does, and "
                f"'{self.blocks[first - 1]}' does not"
            )
        return ""

    def crossing(self, border: int) -> Crossings:
        """Returns what crosses a border, that behind the last block included."""
        return self.crossings[border] if border < len(self.blocks) else self.head_crossings

    def alike_from(self, border: int) -> int:
        """Returns the first of those blocks right before the border for which the last of them can stand: what crosses
        of their results is what crosses of its, all of that does, and they return tensors of the same shapes.

        Blocks that are left out then return the same objects, into which code between them must not write. The border
        itself, where that is so of none.
        """
        last = border - 1
        of = {value: number for number, one in enumerate(self.crossing(border)) for value in one.values}
        tensors = range(self.structures[last].num_tensors)
        if any(self.result(last, tensor) not in of for tensor in tensors):
            return border
        first = last
        stack = next(start for start, end in self.stacks if start <= last < end)
        while first > stack and not self.modified[last] and self._alike(first - 1, last, of):
            first -= 1
        return first

    def _alike(self, block: int, last: int, of: Mapping[Value, int]) -> bool:
        if (
            self.modified[block]
            or self.shapes[block] != self.shapes[last]
            or self.structures[block] != self.structures[last]
        ):
            return False
        for tensor in range(self.structures[last].num_tensors):
            mine = of.get(self.result(block, tensor))
            if mine is not None and mine != of[self.result(last, tensor)]:
                return False
        return True

    def check_ranges(self, ranges: list[tuple[int, int]]) -> None:
        """Checks that `ranges` ([first, end) block of every chunk) cover all blocks once and cut only where
        possible.

        Raises: TraceError that names the range and the reason.
        """
        position = 0
        for chunk, (lo, hi) in enumerate(ranges):
            if lo != position or hi <= lo:
                raise TraceError(
                    f"chunk {chunk} has the blocks [{lo}, {hi}) but must start at block {position} and "
                    f"have at least one: the chunks must cover the {len(self.blocks)} blocks in order"
                )
            position = hi
        if position != len(self.blocks):
            raise TraceError(f"the chunks end at block {position}, but the model has {len(self.blocks)} blocks")
        for lo, _ in ranges[1:]:
            if self.borders[lo]:
                raise TraceError(
                    f"the model cannot be cut before block '{self.blocks[lo]}': {self.borders[lo]}. Use "
                    "fewer chunks (pp * segments), or name other blocks with the setting `blocks`."
                )

    def canonical(self) -> dict[str, str]:
        """Returns {name: canonical name} for every name of a tied parameter."""
        return {name: group[0] for group in self.tied for name in group}

    def layout(self) -> Trace:
        """Returns what says which parameters lie where, without what belongs to one batch or cannot be given to
        another process."""
        return replace(self, structures=(), crossings=(), hooked=(), form=(), decisions=NONE)

    def with_uses_of(self, others: Sequence[Trace], names: Sequence[str]) -> Trace:
        """Returns the same with what recordings of other batches, with the same blocks, have read besides.

        Args:
            names: all names of the model's parameters, in its order.
        """
        every = [self, *others]
        unread = set(self.unread).intersection(*(one.unread for one in others))

        def union(per_trace: Iterable[Iterable[str]]) -> tuple[str, ...]:
            found = {name for one in per_trace for name in one}
            return tuple(name for name in names if name in found)

        def read_in(trace: Trace, region: int) -> list[str]:
            elsewhere = set(trace.unread) - unread
            return [name for name in trace.uses[region] if name not in elsewhere]

        regions = range(len(self.uses))
        around = [tuple(dict.fromkeys(name for one in every for name in one.around[region])) for region in regions]
        return replace(
            self,
            prologue=around[0],
            epilogue=around[-1],
            between=tuple(dict.fromkeys(name for region in around[1:-1] for name in region)),
            around=tuple(around),
            shared=union(one.shared for one in every),
            direct=union(one.direct for one in every),
            uses=tuple(union(read_in(one, region) for one in every) for region in regions),
            unread=union([unread]),
            converted=tuple({name: dtype for one in reversed(every) for name, dtype in one.converted}.items()),
        )

    def placed_as(self, layout: Trace) -> Trace:
        """Returns the recording of this rank's batch on a model whose parameters lie where `layout` says."""
        return replace(
            self,
            shared=layout.shared,
            direct=layout.direct,
            uses=layout.uses,
            unread=layout.unread,
            converted=layout.converted,
        )


def regions_of(names: Sequence[str], blocks: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yields each parameter with the region in which it would be read, by the model's order: that right behind the last
    of those blocks whose parameters stand before it.

    Args:
        names: of the model's parameters, in its order.
        blocks: see `Trace.blocks`.
    """
    behind = {block: number + 1 for number, block in enumerate(blocks)}
    region = 0
    for name in names:
        region = max(region, *(behind.get(name[:i], 0) for i, letter in enumerate(name) if letter == "."), 0)
        yield name, region
