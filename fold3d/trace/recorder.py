"""Recorder: follows one forward pass operation by operation and notes which region reads what; Writes: which memory is
written to in place, where, and by whom.

A chunk that starts at block c skips blocks 0 .. c-1 and the modules with parameters before block c (see `split_model`).
That is right only if all that they return and that is read after the border is handed over (see `crossing`), and
nothing else of them is read there. The recorder finds the first and proves the second: every tensor carries tokens that
say where it comes from, every operation looks at the tokens of its arguments. Autograd graphs would not show what flows
through detached tensors, so values are followed instead, by storage.

A chunk leaves out modules with weights in front of it, and runs the model's own code between them. So what that code
writes into a tensor that the chunk received is written again, and what a module writes is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from fold3d.device import LibraryState, library_rng_state
from fold3d.errors import TraceError
from fold3d.torch_private import storage_key
from fold3d.trace.blocks import outer_modules
from fold3d.trace.caches import Code, forget_fakes
from fold3d.trace.hooked_results import HookedCall, HookedResults
from fold3d.trace.made_up import run_with_values
from fold3d.trace.module_results import INSIDE, Crossing, Crossings, Token, Value
from fold3d.trace.state import SHARED_STATE, StateBehind, StateBetween, tensors_in
from fold3d.trace.without_values import NEEDS_VALUES, WithoutValues
from fold3d.trace.wrappers import is_ours


@dataclass(frozen=True, slots=True)
class Write:
    """One operation that writes into memory."""

    time: int
    """How many results had been returned."""
    region: int
    """Before which block, or in which."""
    by: Value | None
    """The run of a module with weights; None: the model's own code."""


@dataclass(frozen=True, slots=True)
class _Result:
    key: int
    time: int
    is_own: bool


class Writes:
    """Those of one forward.

    Args:
        key_of: tells memory apart: of tensors that share it the same number.
    """

    def __init__(self, key_of: Callable[[Tensor], int]) -> None:
        self._key_of = key_of
        self._makers: dict[int, Value | None] = {}
        self._results: dict[Value, _Result] = {}
        self._tensors: dict[int, set[int]] = {}
        self._writes: dict[int, list[Write]] = {}

    def made(self, key: int, by: Value | None) -> None:
        """An operation has made memory."""
        self._makers[key] = by

    def written(self, key: int, region: int, by: Value | None) -> None:
        """An operation writes into memory."""
        self._writes.setdefault(key, []).append(Write(len(self._results), region, by))

    def returned(self, value: Value, tensor: Tensor, by: Value) -> None:
        """The run of a module has returned `tensor`, which outlives this object."""
        key = self._key_of(tensor)
        self._results[value] = _Result(key, len(self._results), self._makers.get(key) == by)
        self._tensors.setdefault(key, set()).add(id(tensor))

    def parted(self, output: Any, by: Value) -> Any:
        """Returns what a run of a module returns, with copies of the tensors into whose memory it has written and which
        it was given: who reads a copy has it from the module, and who reads the memory, by a name that it had before,
        reads what a chunk without the module does not have."""
        given: dict[int, Tensor] = {}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and self._is_given(self._key_of(leaf), by):
                given[id(leaf)] = leaf
        if not given or len({self._key_of(leaf) for leaf in given.values()}) < len(given):
            return output  # names of one memory stay such
        copies = {name: leaf.clone() for name, leaf in given.items()}
        return tree_map_only(Tensor, lambda leaf: copies.get(id(leaf), leaf), output)

    def _is_given(self, key: int, by: Value) -> bool:
        return self._makers.get(key) != by and any(write.by == by for write in self._writes.get(key, ()))

    def since(self, value: Value) -> list[Write]:
        """Returns those into a result after it was returned; none of what no module but only a hook has seen."""
        result = self._results.get(value)
        if result is None:
            return []
        return [write for write in self._writes.get(result.key, ()) if write.time > result.time]

    def before(self, border: int, value: Value) -> bool:
        """Whether a result is written to between its return and a border."""
        return any(write.region < border for write in self.since(value))

    def come_again(self, value: Value) -> bool:
        """Whether a chunk that received a copy of the result writes into it, and into nothing else, as the whole model
        does: no module writes, and no other result and nothing that the module was given has the same memory."""
        result, writes = self._results[value], self.since(value)
        alone = result.is_own and len(self._tensors[result.key]) == 1
        return alone and bool(writes) and all(write.by is None for write in writes)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors into which a call of an operator writes."""
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


@dataclass(slots=True)
class _Weight:
    """A parameter of one forward: where it is read first and last, and the module that writes to it, if one does."""

    first: int
    last: int = 0
    written_by: str | None = None
    """"": the model's own code."""
    moves: bool = False
    """Each time that is written, not only once."""

    def read(self, here: int) -> None:
        """In a region, the last one so far."""
        self.last = here

    def write(self, by: str, *, moves: bool) -> None:
        """Likewise."""
        self.written_by = by
        self.moves = self.moves or moves

    def closes(self, name: str, borders: range) -> tuple[range, str]:
        """Returns which of the model's borders are none because of what writes to the parameter, and why."""
        writer = self.written_by
        if writer is None:
            return range(0), ""
        if not writer:
            return borders, f"its forward writes to the weight '{name}' between its modules, which every chunk would do"
        if self.moves:
            return borders, (
                f"each forward of '{writer}' changes the weight '{name}' in place, and where the model is cut "
                "backwards of other micro-batches come behind it; assign weight.data, or change it between steps"
            )
        return range(self.first + 1, self.last + 1), (
            f"the forward of '{writer}' writes to the weight '{name}', which is read before and after it: a process "
            "without that module would not have what it has written"
        )


_aten = torch.ops.aten
_SAME_AGAIN = frozenset(
    (
        *(_aten.zero_, _aten.fill_, _aten.clamp_, _aten.clamp_min_, _aten.clamp_max_, _aten.masked_fill_),
        *(_aten.index_fill_, _aten.relu_, _aten.abs_, _aten.nan_to_num_, _aten.embedding_renorm_, _aten.renorm_),
    )
)
"""Operators that leave as it is what they have written before."""


def flops_of(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Returns them by the shapes of arguments and result; 0 for operations that are not counted."""
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = (tensor.shape for tensor in args[:3])
        return int(2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    if packet is getattr(_aten, "_grouped_mm", None):
        one, other = (tensor.shape for tensor in args[:2])
        return int(2 * prod(one) * other[-1])  # each row meets one of the experts
    return 0


# These read the shape of their argument, never its values.
_SHAPE_ONLY = frozenset(
    {
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
        _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided,
        _aten.sym_size, _aten.sym_numel, _aten.sym_stride, _aten.sym_storage_offset, _aten.is_contiguous,
        _aten.is_non_overlapping_and_dense, _aten.is_strides_like_format, torch.ops.prim.device,
    }
)  # fmt: skip


_NO_TOKENS: frozenset[Token] = frozenset()


def _call_of(token: Token) -> tuple[str, int]:
    return token.value.module, token.value.call


@dataclass(slots=True)
class RegionRecord:
    """What was seen in one region."""

    parameters: set[str] = field(default_factory=set)
    direct: set[str] = field(default_factory=set)
    modules: list[str] = field(default_factory=list)
    block_flops: int = 0
    other_flops: int = 0

    def count(self, flops: int, *, in_block: bool) -> None:
        """Adds floating-point operations."""
        if in_block:
            self.block_flops += flops
        else:
            self.other_flops += flops


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode and module hooks around one forward of `model` (a copy whose tensors are fake)."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: list[str] = []
        self.calls: list[int] = []
        self.outputs: list[Any] = []
        self.drawn_in_front: LibraryState | None = None
        """Python's and numpy's generators as the first block found them."""
        self.regions: list[RegionRecord] = [RegionRecord()]
        self.reads: dict[Token, tuple[int, str]] = {}
        self._names: dict[int, list[str]] = {}
        self._weights: dict[int, _Weight] = {}
        self._trained: set[int] = set()  # backwards are for these
        self._tokens: dict[int, frozenset[Token]] = {}
        self._computed: dict[int, int] = {}  # in which regions the model's own code has made memory
        self._last: dict[int, int] = {}  # in which regions memory was made or written last
        self._storages: list[object] = []  # kept, because the address of a freed one is used again
        self._block: str | None = None
        self._outer: list[str] = []
        self._made: Token | None = None
        self._calls: dict[str, int] = {}
        # What a module reads counts once anything reads what it returned: many run for a result that nobody wants.
        self._waiting: dict[tuple[str, int], list[tuple[Token, int, str]]] = {}
        self._wanted: set[tuple[str, int]] = set()
        self._returned: dict[Value, tuple[Tensor, int]] = {}
        self._writes = Writes(self._key)
        self._kept: dict[int, str] = {}
        self._buffers: list[tuple[int, int]] = []  # of the block that runs, when it began
        self._changing: set[str] = set()
        self._code = Code(model)
        names = list(blocks)
        self._state, self._between = StateBehind(model, names), StateBetween(model, names)
        self._going_on: list[tuple[int, int, str]] = []
        """The first and another block that change an attribute, and which."""
        self._hooked: list[tuple[HookedCall, ...]] = []
        for block in dict.fromkeys(names):
            for module in list(model.get_submodule(block).modules())[1:]:
                self._run_by_itself(module)  # before hooks see what it returns
        self._hooks = HookedResults(model, names, self._note_shown)
        self._install(model, names)

    def _install(self, model: nn.Module, blocks: list[str]) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(self._key(parameter), []).append(name)
            if parameter.requires_grad:
                self._trained.add(self._key(parameter))
        for name in blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter_block(name), prepend=True)
            block.register_forward_hook(self._leave_block, prepend=False)
            block.forward = self._called_itself(block, block.forward, self._enter_block(name))
        for name, module in outer_modules(model, blocks):
            module.register_forward_pre_hook(self._enter_outer(name, module), prepend=True)
            module.register_forward_hook(self._leave_outer, always_call=True)
            self._run_by_itself(module)

    # -- modules --

    def _enter_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._block is not None:
                raise TraceError(
                    f"block '{name}' runs inside block '{self._block}': blocks must run one after the "
                    "other. Choose other blocks with the setting `blocks`."
                )
            forget_fakes(self._code)  # what one region makes and another one finds, a rank makes again
            if not self.order:
                self.drawn_in_front = library_rng_state()
            self._block = name
            call = self._calls[name] = self._calls.get(name, -1) + 1
            self._made = Token(len(self.order), Value(name, call, INSIDE))
            self.order.append(name)
            self.calls.append(call)
            self._buffers = buffers_of(module)
            self._between.enter()
            self._hooks.begin()
            region = self.regions[-1]
            region.parameters.update(f"{name}.{p}" for p, _ in module.named_parameters(remove_duplicate=False))

        return hook

    def _called_itself(self, block: nn.Module, forward: Callable[..., Any], enter: Callable[..., None]) -> Any:
        """Returns the forward of a block, for code that calls it by this name, and by no hook."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._block is not None:
                return run(*args, **kwargs)
            enter(block, args)
            return self._leave_block(block, args, run(*args, **kwargs))

        def run(*args: Any, **kwargs: Any) -> Any:
            self._hooks.given(args, kwargs)
            self._between.given({**{f"argument {place}": one for place, one in enumerate(args)}, **kwargs})
            try:
                return forward(*args, **kwargs)
            except NEEDS_VALUES as error:
                if self._hooks.shown:
                    raise
                return self._run_with_values(block, args, kwargs, error)

        return called

    def _run_by_itself(self, module: nn.Module) -> None:
        """Has a module with weights, in a block or around them, run with values where it needs some, unless hooks of
        modules inside of it may hand on what these return."""
        if isinstance(module, torch.jit.ScriptModule) or next(module.parameters(), None) is None:
            return  # modules without weights that lie around the blocks run again in later chunks
        forward: Callable[..., Any] = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except NEEDS_VALUES as error:
                inner = (one for one in module.modules() if one is not module)
                hooked = any(not is_ours(hook) for one in inner for hook in one._forward_hooks.values())
                if hooked or self._made is None:
                    raise
                return self._run_with_values(module, args, kwargs, error)

        module.forward = run

    def _run_with_values(self, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        """The module that runs decides by values: runs it with some, and takes all that it was given for read."""
        mode = next((one for one in _get_current_dispatch_mode_stack() if isinstance(one, WithoutValues)), None)
        if mode is None:
            raise error
        self._read({self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)})
        try:
            result = run_with_values(module, args, kwargs, mode, twice=True)
        except Exception as own:
            raise error from own
        assert self._made is not None
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._tokens[self._key(leaf)] = frozenset({self._made})
                self._writes.made(self._key(leaf), self._made.value)
        if self._block is not None and next(module.buffers(), None) is not None:
            self._changing.add(self._block)  # it may: only a copy has run
        return result

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> Any:
        name = self._block
        assert name is not None
        forget_fakes(self._code)
        if buffers_of(module) != self._buffers:
            self._changing.add(name)
        self._hooked.append(self._hooks.end())
        put = self._between.put()
        kept = {id(tensor) for _, tensor in put}
        # Who reads a copy has it from the block, and who reads the tensor itself from where the block has put it.
        if any(id(leaf) in kept for leaf in tree_leaves(output)):
            output = tree_map_only(Tensor, lambda leaf: leaf.clone() if id(leaf) in kept else leaf, output)
        output = self._return(output)
        self.outputs.append(output)
        self._block = self._made = None
        self._state.note()
        for holder, tensor in put:
            self.note_kept(f"'{holder}', which '{name}' shares with other blocks", tensor)
        here = len(self.order) - 1
        self._going_on += [(first, here, what) for what, first in self._between.leave(here)]
        self.regions.append(RegionRecord())
        return output

    def _enter_outer(self, name: str, module: nn.Module) -> Callable[..., None]:
        parameters = [f"{name}.{p}" for p, _ in module.named_parameters(remove_duplicate=False)]

        def hook(module: nn.Module, args: Any) -> None:
            if not self._outer and self._block is None:
                region = self.regions[-1]
                if name not in region.modules:
                    region.modules.append(name)
                region.parameters.update(parameters)
                if parameters:
                    call = self._calls[name] = self._calls.get(name, -1) + 1
                    self._made = Token(len(self.order), Value(name, call, INSIDE))
            self._outer.append(name)

        return hook

    def _leave_outer(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._outer.pop()
        if not self._outer and self._block is None and self._made is not None:
            output = self._return(output)
            self._made = None
        return output

    def _return(self, output: Any) -> Any:
        """A module that other chunks leave out has returned `output`: what is read of it from now on is its result.
        Returns that."""
        made = self._made
        assert made is not None
        output = self._writes.parted(output, made.value)
        mine: dict[int, set[Token]] = {}
        for number, tensor in enumerate(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
            value = Value(made.value.module, made.value.call, number)
            self._returned[value] = tensor, tensor._version
            self._writes.returned(value, tensor, made.value)
            mine.setdefault(self._key(tensor), set()).add(Token(made.region, value))
        for key, tokens in mine.items():
            before = self._tokens.get(key, _NO_TOKENS)
            # What the module was given and returns as it is can be read under either name.
            self._tokens[key] = frozenset(tokens) if made in before else before | tokens
        return output

    def _note_shown(self, value: Value, tensor: Tensor) -> None:
        """A hook on a module inside of the block that runs is shown `tensor`."""
        assert self._made is not None
        self._returned[value] = tensor, tensor._version
        self._tokens[self._key(tensor)] = frozenset({Token(self._made.region, value)})

    # -- operations --

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        inputs = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        keys = {self._key(tensor) for tensor in inputs}
        mutable = func._schema.is_mutable
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        written = [*map(self._key, written_by(func, args, kwargs))] if mutable else []
        # Of a view, and of what the model's own code computes, who reads the result reads the values.
        in_own_code = self._made is None  # no module with weights runs
        is_own = in_own_code and self._computed.keys() >= set(written)
        carries = bool(made) and (is_own or (not mutable and keys.issuperset(map(self._key, made))))
        tokens = _NO_TOKENS if packet in _SHAPE_ONLY else self._read(keys, carries)
        by = None if self._made is None else self._made.value
        for key in written:
            self._writes.written(key, self._region(), by)
            if key in self._names:
                self._weight(key).write(
                    "" if by is None else by.module, moves=key in self._trained and packet not in _SAME_AGAIN
                )
        self._last.update(dict.fromkeys((*map(self._key, made), *written), self._region()))
        if self._made is not None:
            if mutable and not all(self._made in self._tokens.get(key, _NO_TOKENS) for key in keys):
                self._want(self._made)  # it may write into a buffer, or into what others read
            tokens = frozenset({self._made})
        for leaf in made:
            key = self._key(leaf)
            if key in self._names:
                continue
            if key not in keys:
                self._tokens[key] = tokens
                if by is None:
                    self._computed[key] = self._region()
                self._writes.made(key, by)
            elif mutable:
                self._tokens[key] = self._tokens.get(key, _NO_TOKENS) | tokens
        self._count(packet, args, kwargs, result)
        return result

    def _read(self, keys: set[int], carries: bool = False) -> frozenset[Token]:
        reader = self._block or (self._outer[0] if self._outer else "the model's forward")
        found: frozenset[Token] = _NO_TOKENS
        for key in keys:
            names = self._names.get(key)
            if names is not None:
                self._read_parameter(names, self.regions[-1])
                self._weight(key)
            # A parameter may have been returned by its module.
            found |= self._tokens.get(key, _NO_TOKENS) if carries else self._read_tokens(key, reader)
        return found

    def read_result(self, result: Any) -> None:
        """Notes that the forward's result is read at the end: it must be right on the last chunk."""
        for tensor in tensors_in(result):
            self._read_tokens(self._key(tensor), "the model's result")

    def _read_tokens(self, key: int, reader: str) -> frozenset[Token]:
        here = self._region()
        tokens = self._tokens.get(key, _NO_TOKENS)
        made = self._made if self._block is None else None
        waits = made is not None and _call_of(made) not in self._wanted
        for token in tokens:
            if made is not None and waits:
                self._waiting.setdefault(_call_of(made), []).append((token, here, reader))
            else:
                self._note_read(token, here, reader)
        return tokens

    def _region(self) -> int:
        """Returns before which block, or in which, the forward is."""
        return len(self.order) - (self._block is not None)

    def _want(self, made: Token) -> None:
        """What the running module does matters, whoever reads what it returns."""
        self._wanted.add(_call_of(made))
        for waiting in self._waiting.pop(_call_of(made), []):
            self._note_read(*waiting)

    def _note_read(self, token: Token, here: int, reader: str) -> None:
        waiting = [(token, here, reader)]
        while waiting:
            one, place, by = waiting.pop()
            if place > one.region and place > self.reads.get(one, (-1, ""))[0]:
                self.reads[one] = (place, by)
            waiting += self._waiting.pop(_call_of(one), [])

    def _read_parameter(self, names: list[str], region: RegionRecord) -> None:
        if any(name in region.parameters for name in names) and (self._block or self._outer):
            return
        region.parameters.add(names[0])
        region.direct.add(names[0])

    def _weight(self, key: int) -> _Weight:
        """Returns what is known of a parameter, which is read here, or written to."""
        here = self._region()
        found = self._weights.setdefault(key, _Weight(here))
        found.read(here)
        return found

    def _count(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.regions[-1].count(flops_of(packet, args, kwargs, result), in_block=self._block is not None)

    def _key(self, tensor: Tensor) -> int:
        self._storages.append(tensor.untyped_storage() if tensor.layout == torch.strided else tensor)
        return storage_key(tensor)

    # -- results --

    def shapes(self) -> tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]:
        """Per block: (shape, dtype) of each tensor that it returned."""
        return tuple(
            tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            for output in self.outputs
        )

    def modified(self) -> tuple[bool, ...]:
        """Per block: whether a returned tensor was written to in place later on."""
        modified = {(value.module, value.call) for value in self._returned if self._is_modified(value)}
        return tuple(call in modified for call in zip(self.order, self.calls, strict=True))

    def _is_modified(self, value: Value) -> bool:
        tensor, version = self._returned[value]
        if value in self._hooks:
            return tensor._version != version or self._hooks.modified(value)
        return tensor._version != version or bool(self._writes.since(value))

    def borders(self) -> tuple[str, ...]:
        """Per border: why the model cannot be cut there, or an empty string; that behind the last block included."""
        reasons = [""] * (len(self.order) + 1)
        for name in self._changing:
            places = [place for place, block in enumerate(self.order) if block == name]
            for border in range(places[0] + 1, places[-1] + 1):
                reasons[border] = reasons[border] or (
                    f"'{name}' runs before and after it, and changes buffers of its own each time"
                )
        for first, last, what in self._going_on:
            for border in range(first + 1, last + 1):
                reasons[border] = reasons[border] or SHARED_STATE.format(self.order[first], self.order[last], what)
        for key, weight in self._weights.items():
            closed, why = weight.closes(self._names[key][0], range(1, len(reasons)))
            for border in closed:
                reasons[border] = reasons[border] or why
        for token, (last, reader) in self._in_order():
            why = self._why_not(token, last)
            if why:
                for border in range(token.region + 1, last + 1):
                    reasons[border] = reasons[border] or f"{token.said(reader)}{why}"
        for border, crossings in enumerate(self.crossings()):
            if border and not crossings:
                reasons[border] = reasons[border] or "nothing that is made before it is read after it"
        return tuple(reasons)

    def _in_order(self) -> list[tuple[Token, tuple[int, str]]]:
        """Returns what is read later in the order of where it comes from: what is read at once comes in any order."""
        return sorted(self.reads.items(), key=lambda one: (one[0].region, one[0].value))

    def _why_not(self, token: Token, last: int) -> str:
        """Returns why a tensor cannot be handed over; "" where it can."""
        if token.value.tensor == INSIDE:
            return ", and it is no result of that module"
        if self._is_handed_on(token) and last == token.region + 1:
            return ""
        if self._is_modified(token.value):
            if token.value in self._hooks:
                return ", and it is written to in place in between"
            if not self._writes.come_again(token.value):
                return ", and it is written to in place in between, by a module with weights or under another name"
        key = self._key(self._returned[token.value][0])
        if key in self._kept:
            return f", and it is also kept in {self._kept[key]}"
        return ""

    def note_kept(self, attribute: str, tensor: Tensor) -> None:
        """A module has kept the tensor in an attribute, where it can be read without the module's result."""
        self._kept.setdefault(self._key(tensor), attribute)
        self.note_left(attribute, tensor)

    def made_in(self, tensor: Tensor) -> int:
        """Returns the region in which the model's own code computed the tensor, or a module did; the number of blocks
        where it comes of the model's arguments alone."""
        key = self._key(tensor)
        regions = [token.region for token in self._tokens.get(key, _NO_TOKENS)]
        return self._computed.get(key, min(regions)) if regions else len(self.order)

    def is_behind(self, tensor: Tensor) -> bool:
        """Whether the last block has made the tensor, or code behind it has made or written it."""
        return self._last.get(self._key(tensor), -1) >= len(self.order) - 1

    def state_behind(self) -> tuple[list[str], list[str]]:
        """Returns what `StateBehind.changed` does."""
        return self._state.changed(self.is_behind)

    def note_left(self, where: str, tensor: Tensor) -> None:
        """The tensor outlives the forward: who computed it read what it is computed from."""
        key = self._key(tensor)
        for token in self._tokens.get(key, _NO_TOKENS):
            self._note_read(token, self._computed.get(key, token.region), where)

    def _is_handed_on(self, token: Token) -> bool:
        """Whether a block returned it."""
        return self._blocks_call(token.region) == (token.value.module, token.value.call)

    def _blocks_call(self, region: int) -> tuple[str, int] | None:
        return (self.order[region], self.calls[region]) if region < len(self.order) else None

    def crossings(self) -> tuple[Crossings, ...]:
        """Per border: the tensors that cross it; that behind the last block included."""
        found: list[dict[int, list[Value]]] = [{} for _ in range(len(self.order) + 1)]
        numbers = {value: number for number, value in enumerate(self._returned)}
        read = [(token.value, token.region, last) for token, (last, _) in self.reads.items()]
        for value, region, last in sorted((one for one in read if one[0] in numbers), key=lambda one: numbers[one[0]]):
            for border in range(region + 1, last + 1):
                found[border].setdefault(id(self._returned[value][0]), []).append(value)
        return tuple(
            tuple(self._crossing(border, values) for values in tensors.values()) for border, tensors in enumerate(found)
        )

    def _crossing(self, border: int, values: list[Value]) -> Crossing:
        tensor = self._returned[values[0]][0]
        modified = any(map(self._is_modified, values))
        return Crossing(
            values=tuple(values),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            modified=modified,
            written_before=any(self._writes.before(border, value) for value in values),
        )

    def hooked(self) -> tuple[tuple[HookedCall, ...], ...]:
        """Returns of each block the calls that hooks saw; none if nobody reads what hooks have of any."""
        is_read = any(token.value in self._hooks for token in self.reads)
        return tuple(self._hooked) if is_read else ((),) * len(self.order)

    def leaks(self) -> tuple[str, ...]:
        """Returns what is read of blocks otherwise than by the next one of what the one before returned."""
        regions = {call: region for region, call in enumerate(zip(self.order, self.calls, strict=True))}
        handing = dict[int, set[int]]()  # in which regions blocks have returned a tensor
        for value, (tensor, _) in self._returned.items():
            if (value.module, value.call) in regions:
                handing.setdefault(id(tensor), set()).add(regions[value.module, value.call])

        def is_leak(token: Token, last: int) -> bool:
            if token.value.tensor == INSIDE or token.value in self._hooks:
                return True
            between = range(token.region + 1, last)
            return not handing[id(self._returned[token.value][0])].issuperset(between)

        return tuple(
            token.said(reader)
            for token, (last, reader) in self._in_order()
            if (_call_of(token) in regions or token.value in self._hooks) and is_leak(token, last)
        )


def buffers_of(module: nn.Module) -> list[tuple[int, int]]:
    """Returns what differs once any buffer in the module is another tensor, or was written to."""
    return [(id(buffer), buffer._version) for buffer in module.buffers()]
