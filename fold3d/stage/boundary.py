"""What crosses the borders of a chunk: the tensors (Cargo) and results that hooks hand on; ChunkRun: where the model's
forward is that runs as one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fold3d import seeding
from fold3d._C import ForwardCursor
from fold3d.device import LibraryState, library_rng_state
from fold3d.errors import SplitError
from fold3d.tensor_parallel.whole_results import plain_parts
from fold3d.torch_private import saving_hook
from fold3d.trace.coat import Coat, Wrap
from fold3d.trace.hooked_results import HookedCall
from fold3d.trace.model_trace import Trace
from fold3d.trace.module_results import Crossing, Crossings, TreeStructure, Value


def hooked_modules(trace: Trace) -> list[str]:
    """Returns the modules whose results cross any border since hooks hand them on."""
    crossing = {value.module for border in trace.crossings for one in border for value in one.values}
    return [name for name in dict.fromkeys(one.module for calls in trace.hooked for one in calls) if name in crossing]


class BlockRun:
    """One run of a block in its chunk: tells which of the recorded calls a call of a module inside of it is."""

    def __init__(self, calls: Iterable[HookedCall]) -> None:
        self._calls = {(one.module, one.place): one.call for one in calls}
        self._places: dict[str, int] = {}

    def call_of(self, module: str) -> int | None:
        """Returns the number in the forward of the call that has just ended; None for one that was not recorded."""
        place = self._places.get(module, 0)
        self._places[module] = place + 1
        return self._calls.get((module, place))


def show(
    model: nn.Module,
    calls: Sequence[HookedCall],
    received: Mapping[tuple[str, int], Mapping[int, Tensor]],
    given: Sequence[Any],
) -> None:
    """Shows hooks on modules inside of a block that is left out what these modules returned.

    Hooks are called in their order, with those first arguments of the module's that the block was given. Of what nobody
    reads, which was not received, tensors are empty: hooks collect it nevertheless, so that everything has its place.

    Args:
        calls: of the block.
        received: (module, call) -> its tensors, by number.
        given: the leaves of the block's arguments.
    Raises: SplitError when a hook fails without the other arguments.
    """
    for one in calls:
        tensors = received.get((one.module, one.call), {})
        output = one.structure.unflatten(
            [tensors[number] if number in tensors else torch.empty(0) for number in range(one.structure.num_tensors)]
        )
        module = model.get_submodule(one.module)
        try:
            with Coat() as coat:
                coat.put(Wrap.SHOWN, module, lambda *_, output=output, **__: output)
                module(*(given[number] for number in one.given))
        except Exception as error:
            raise SplitError(
                f"a hook of '{one.module}' fails with {type(error).__name__}: {error}. Its result is read behind a "
                "cut, and hooks run there again, on the result and what the block hands on to the module as it is: all "
                "else that it was given is in another part of the model. Let the hook read nothing but the result, "
                "take it off, or set pp=1 and segments=1"
            ) from error


class Borders:
    """What crosses the borders of chunks in one form of call."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.draws = trace.draws
        """Whether code from the first block on draws from Python's or numpy's generators."""
        self._alike_from: dict[int, int] = {}
        self._shows: dict[int, bool] = {}
        self._earlier: dict[int, frozenset[int]] = {}
        self._around = frozenset(name for region in trace.around for name in region)

    def cargo(self, first: int, end: int, received: Sequence[Tensor], *, leaves: bool) -> Cargo:
        """Returns what a run of the blocks [first, end) takes and hands on.

        Args:
            leaves: whether anything is handed on.
        Raises: SplitError for another number of tensors.
        """
        trace = self._trace
        arriving = trace.crossing(first) if first else ()
        if len(received) != len(arriving):
            where = f"before block '{trace.blocks[first]}'" if first < len(trace.blocks) else "behind the last block"
            takes = f"{len(arriving)} cross the border {where}" if first else "the first chunk takes none"
            raise SplitError(f"the chunk from block {first} on was given {len(received)} tensors, but {takes}")
        return Cargo(arriving, trace.crossing(end) if leaves else (), received)

    def runs(self, module: str) -> bool:
        """Returns whether this form of call runs a module around the blocks."""
        return module in self._around

    def structure(self, block: int) -> TreeStructure:
        """Returns the structure of what a block returns."""
        return self._trace.structures[block]

    def begin(self, block: int) -> BlockRun:
        """A block begins in its chunk."""
        return BlockRun(self._trace.hooked[block])

    def show(self, first: int, block: int, model: nn.Module, cargo: Cargo, arguments: Any) -> None:
        """Shows hooks inside of a block before `first` what was received of their modules' results, and which of the
        block's arguments, (args, kwargs), these were given."""
        if self._shows_before(first):
            show(model, self._trace.hooked[block], cargo.arrived, tree_leaves(plain_parts(arguments)))

    def alike(self, first: int, cargo: Cargo, *, fill: float) -> tuple[int, Any, Any]:
        """Returns the first of the blocks before `first` for which the last of them can stand, what that returned, and
        what those before it return: the same, but for tensors that nobody reads, which are `fill`."""
        trace = self._trace
        if first not in self._alike_from:
            self._alike_from[first] = trace.alike_from(first) if first else 0
        alike = self._alike_from[first]
        if alike == first or self._shows_before(first):
            return first, None, None
        last, structure = (trace.blocks[first - 1], trace.calls[first - 1]), trace.structures[first - 1]
        whole = cargo.whole(*last, structure)
        if alike == first - 1:
            return alike, whole, whole
        read, arrived = self._read_of_earlier(first), cargo.arrived[last]
        tensors = [arrived[n] if n in read else _of_no_memory(arrived[n], fill) for n in range(structure.num_tensors)]
        return alike, whole, structure.unflatten(tensors)

    def _read_of_earlier(self, first: int) -> frozenset[int]:
        """Returns which tensors that blocks return before the last one in front of `first` are read behind it."""
        if first not in self._earlier:
            read = {value for crossing in self._trace.crossing(first) for value in crossing.values}
            blocks, count = range(self._alike_from[first], first - 1), self._trace.structures[first - 1].num_tensors
            self._earlier[first] = frozenset(
                number for number in range(count) if any(self._trace.result(block, number) in read for block in blocks)
            )
        return self._earlier[first]

    def _shows_before(self, first: int) -> bool:
        if first not in self._shows:
            self._shows[first] = any(self._trace.hooked[:first])
        return self._shows[first]


class Cargo:
    """What the chunk received stands where the modules before it would have returned it; what it hands on are such
    tensors that a later chunk reads, too, and those that its own modules return.

    One that is received and handed on is the same tensor, so autograd adds the gradient that comes back for it to those
    of its readers here.

    Args:
        arriving: what crosses the border before the chunk.
        leaving: what crosses the border behind it.
        received: a tensor for each of `arriving`.
    """

    def __init__(self, arriving: Crossings, leaving: Crossings, received: Sequence[Tensor]) -> None:
        self._leaving = leaving
        self.arrived: dict[tuple[str, int], dict[int, Tensor]] = {}
        self._leaves: dict[Value, Tensor] = {}
        self._wanted: dict[tuple[str, int], list[Value]] = {}
        for crossing in leaving:
            for value in crossing.values:
                self._wanted.setdefault((value.module, value.call), []).append(value)
        self._written = {value for crossing in leaving if crossing.written_before for value in crossing.values}
        wanted = {value for crossing in leaving for value in crossing.values}
        for crossing, tensor in zip(arriving, received, strict=True):
            # Code that writes into a module's result would write into a leaf, which autograd forbids.
            mine = tensor.clone() if crossing.modified else tensor
            for value in crossing.values:
                self.arrived.setdefault((value.module, value.call), {})[value.tensor] = mine
                if value in wanted:
                    self._leaves[value] = tensor.view_as(tensor) if tensor.requires_grad else tensor

    def whole(self, module: str, call: int, structure: TreeStructure) -> Any:
        """Returns what the module returned, `structure`, when all of its tensors were received; else None."""
        tensors = self.arrived.get((module, call), {})
        if len(tensors) < structure.num_tensors:
            return None
        return structure.unflatten([tensors[number] for number in range(structure.num_tensors)])

    def put_into(self, module: str, call: int, stand_in: Any) -> Any:
        """Returns `stand_in`, of the structure that the module returns, with the tensors that were received."""
        tensors = self.arrived.get((module, call))
        if not tensors:
            return stand_in
        leaves, spec = tree_flatten(stand_in)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for number, tensor in tensors.items():
            if number >= len(places):
                raise _otherwise(module)
            leaves[places[number]] = tensor
        return tree_unflatten(leaves, spec)

    def note(self, module: str, call: int, output: Any, structure: TreeStructure | None = None) -> None:
        """The chunk has run the module, which returned `output`: keeps what leaves.

        Raises: SplitError when it returned something else than recorded.
        """
        values = self._wanted.get((module, call))
        if values is None:
            return
        if structure is not None:
            tensors = structure.flatten(plain_parts(output), module)
        else:
            tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        for value in values:
            if value.tensor >= len(tensors):
                raise _otherwise(module)
            tensor = tensors[value.tensor]
            self._leaves[value] = tensor.clone() if value in self._written else tensor

    def leave(self) -> list[Tensor]:
        """Returns the tensors that the chunk hands on. Raises: SplitError when one is missing, or nested."""
        leaving = [self._of(crossing) for crossing in self._leaving]
        for crossing, tensor in zip(self._leaving, leaving, strict=True):
            if tensor.is_nested:
                raise SplitError(
                    f"module '{crossing.values[0].module}' returned a nested tensor, which cannot go to another chunk: "
                    "have the model pad (nn.TransformerEncoder(..., enable_nested_tensor=False)), or set pp=1 and "
                    "segments=1"
                )
        return leaving

    def _of(self, crossing: Crossing) -> Tensor:
        for value in crossing.values:
            if value in self._leaves:
                return self._leaves[value]
        value = crossing.values[0]
        raise SplitError(
            f"module '{value.module}' was called fewer times than recorded, and a later chunk needs what call "
            f"{value.call + 1} returned; pass an `example` that is like the training batches"
        )


def _otherwise(module: str) -> SplitError:
    return SplitError(
        f"module '{module}' returned fewer tensors than recorded; pass an `example` that is like the training batches"
    )


def _of_no_memory(like: Tensor, fill: float) -> Tensor:
    if type(like) is not Tensor or not (like.is_floating_point() or like.is_complex()):
        return like  # of a LazyWhole nobody asks the shape without need: its ranks would meet
    made = torch.full((), fill, dtype=like.dtype, device=like.device)
    if torch.is_grad_enabled():  # code may give it hooks
        made.requires_grad_()
    return made.expand(like.shape)


class ChunkExit(BaseException):
    """Ends the model's forward after the chunk's last block. No Exception, so that no `except Exception`
    swallows it."""

    def __init__(self, owner: object) -> None:
        super().__init__("the chunk is done")
        self.owner = owner


class ChunkRun(ForwardCursor):
    """One run of the model's forward as a chunk.

    Args:
        borders: what crosses them in the form in which the model is called.
        fill: what stands for floating-point results of blocks that the chunk leaves out, and that nothing reads.
    Raises: SplitError when another number of tensors was received than crosses the border before the chunk.
    """

    def __init__(
        self,
        blocks: tuple[int, int],
        last: bool,
        device: torch.device,
        seed: int | None,
        constants: Sequence[int],
        received: Sequence[Tensor],
        borders: Borders,
        fill: float = 0.0,
    ) -> None:
        lo, hi = blocks
        self.generators = [] if seed is None else seeding.generators_of(device)
        super().__init__(max(lo - 1, 0), seed, self.generators, constants)  # the last of the blocks before is Python's
        self.mark = object()  # tells it from other runs without keeping it
        self.lo = lo
        self.hi = hi
        self.last = last
        self.device = device
        self.received = received
        self.borders = borders
        self.cargo = borders.cargo(lo, hi, received, leaves=not last)
        self.alike_from, self.alike, self.earlier = borders.alike(lo, self.cargo, fill=fill)
        self.skip_from(self.alike_from)
        self.leaving: list[Tensor] | None = None
        self.drawn_in_front: LibraryState | None = (
            None  # Python's and numpy's generators, as the first block found them
        )
        self.block: BlockRun | None = None
        self._calls: dict[str, int] = {}
        self.outer_checkpoint = saving_hook()
        self.checkpoint: object = None

    def call_of(self, module: str) -> int:
        """Returns how often the module was called before by the model's forward, and counts this call."""
        call = self._calls[module] = self._calls.get(module, -1) + 1
        return call

    def note_drawn(self) -> None:
        """The first block begins, on every chunk: what Python's and numpy's generators have drawn so far is the same
        on all."""
        if self.drawn_in_front is None:
            self.drawn_in_front = library_rng_state()

    def begin_block(self, block: BlockRun) -> None:
        """A block of the chunk begins."""
        self.block = block

    def leave(self, leaving: list[Tensor]) -> bool:
        """The chunk's last block is done; returns whether the forward may be ended right here."""
        self.leaving = leaving
        self.checkpoint = saving_hook()
        return self.checkpoint is self.outer_checkpoint
