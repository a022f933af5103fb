"""Recorder: follows one forward pass operation by operation and notes which region reads what.

A chunk that starts at block c skips blocks 0 .. c-1 and replaces the modules with parameters before block c
by zeros (see `split_model`). That is right only if nothing from before the border, other than what block c-1
returned, is read after it. The recorder proves that: every tensor carries tokens that say where it comes
from, every operation looks at the tokens of its arguments. Autograd graphs would not show what flows through
detached tensors, so values are followed instead, by storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves
from torch.utils.flop_counter import flop_registry

from fold3d.errors import TraceError
from fold3d.trace.caches.apart import forget_fakes
from fold3d.trace.caches.code import Code

_aten = torch.ops.aten

# These read the shape of their argument, never its values.
_SHAPE_ONLY = frozenset(
    {
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
        _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided,
        _aten.sym_size, _aten.sym_numel, _aten.sym_stride,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Token:
    """Where a value comes from: what a block returned (`chain`), or anything else made in that region."""

    region: int
    chain: bool
    source: str

    def first_bad_border(self) -> int:
        """The first border c at which a chunk may not start if it reads this value."""
        return self.region + 2 if self.chain else self.region + 1

    def said(self, reader: str) -> str:
        """Returns that `reader` reads it later."""
        what = f"what block '{self.source}' returned" if self.chain else f"a tensor made in '{self.source}'"
        return f"{what} is read again later, in '{reader}'"


_NO_TOKENS: frozenset[Token] = frozenset()


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
        self.outputs: list[Any] = []
        self.regions: list[RegionRecord] = [RegionRecord()]
        self.reads: dict[Token, tuple[int, str]] = {}
        self._names: dict[int, list[str]] = {}
        self._tokens: dict[int, frozenset[Token]] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._block: str | None = None
        self._outer: list[str] = []
        self._stubbed = False
        self._around = "the model's forward"
        self._versions: list[list[int]] = []
        self._code = Code(model)
        self._install(model, list(blocks))

    def _install(self, model: nn.Module, blocks: list[str]) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(self._key(parameter), []).append(name)
        for name in blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter_block(name), prepend=True)
            block.register_forward_hook(self._leave_block, prepend=False)
        for name, module in outer_modules(model, blocks):
            module.register_forward_pre_hook(self._enter_outer(name, module), prepend=True)
            module.register_forward_hook(self._leave_outer, always_call=True)

    # -- modules --

    def _enter_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if name in self.order:
                raise TraceError(
                    f"block '{name}' runs more than once in a forward pass, so the model cannot be cut "
                    "into consecutive blocks. Choose other blocks with the setting `blocks`."
                )
            if self._block is not None:
                raise TraceError(
                    f"block '{name}' runs inside block '{self._block}': blocks must run one after the "
                    "other. Choose other blocks with the setting `blocks`."
                )
            forget_fakes(self._code)  # what one region makes and another one finds, a rank makes again
            self._block = name
            self.order.append(name)
            region = self.regions[-1]
            region.parameters.update(f"{name}.{p}" for p, _ in module.named_parameters(remove_duplicate=False))

        return hook

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._block
        assert name is not None
        forget_fakes(self._code)
        token = frozenset({Token(len(self.order) - 1, True, name)})
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._tokens[self._key(tensor)] = token
        self.outputs.append(output)
        self._versions.append([tensor._version for tensor in tensors])
        self._block = None
        self.regions.append(RegionRecord())

    def _enter_outer(self, name: str, module: nn.Module) -> Callable[..., None]:
        parameters = [f"{name}.{p}" for p, _ in module.named_parameters(remove_duplicate=False)]

        def hook(module: nn.Module, args: Any) -> None:
            if not self._outer and self._block is None:
                region = self.regions[-1]
                if name not in region.modules:
                    region.modules.append(name)
                region.parameters.update(parameters)
                self._stubbed = bool(parameters)
            self._outer.append(name)

        return hook

    def _leave_outer(self, module: nn.Module, args: Any, output: Any) -> None:
        self._outer.pop()
        if not self._outer:
            self._stubbed = False

    # -- operations --

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        inputs = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        keys = {self._key(tensor) for tensor in inputs}
        tokens = _NO_TOKENS if packet in _SHAPE_ONLY else self._read(keys)
        if self._block is not None:
            tokens = frozenset({Token(len(self.order) - 1, False, self._block)})
        elif self._stubbed:
            tokens = frozenset({Token(len(self.order), False, self._outer[0])})
        mutable = func._schema.is_mutable
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            key = self._key(leaf)
            if key in self._names:
                continue
            if key not in keys:
                self._tokens[key] = tokens
            elif mutable:
                self._tokens[key] = self._tokens.get(key, _NO_TOKENS) | tokens
        self._count(packet, args, kwargs, result)
        return result

    def _read(self, keys: set[int]) -> frozenset[Token]:
        reader = self._block or (self._outer[0] if self._outer else self._around)
        found: frozenset[Token] = _NO_TOKENS
        for key in keys:
            names = self._names.get(key)
            if names is not None:
                self._read_parameter(names, self.regions[-1])
            else:
                found |= self._read_tokens(key, reader)
        return found

    def read_result(self, result: Any) -> None:
        """Notes that the forward's result is read at the end: it must be right on the last chunk."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self._key(leaf) not in self._names:
                self._read_tokens(self._key(leaf), "the model's result")

    def _read_tokens(self, key: int, reader: str) -> frozenset[Token]:
        here = len(self.order) - (self._block is not None)
        tokens = self._tokens.get(key, _NO_TOKENS)
        for token in tokens:
            if here >= token.first_bad_border() and here > self.reads.get(token, (-1, ""))[0]:
                self.reads[token] = (here, reader)
        return tokens

    def _read_parameter(self, names: list[str], region: RegionRecord) -> None:
        if any(name in region.parameters for name in names) and (self._block or self._outer):
            return
        region.parameters.add(names[0])
        region.direct.add(names[0])

    def _count(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        flops = 0
        if packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        elif packet is _aten._scaled_dot_product_flash_attention_for_cpu:
            query, key, value = (tensor.shape for tensor in args[:3])
            flops = 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        elif packet is getattr(_aten, "_grouped_mm", None):
            one, other = (tensor.shape for tensor in args[:2])
            flops = 2 * prod(one) * other[-1]  # each row meets one of the experts
        self.regions[-1].count(flops, in_block=self._block is not None)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages.append(storage)  # kept, because a freed storage's address is used again
        return int(storage._cdata)

    # -- results --

    def shapes(self) -> tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]:
        """Per block: (shape, dtype) of each tensor that it returned."""
        return tuple(
            tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            for output in self.outputs
        )

    def modified(self) -> tuple[bool, ...]:
        """Per block: whether a returned tensor was written to in place later on."""
        return tuple(
            [leaf._version for leaf in tree_leaves(output) if isinstance(leaf, Tensor)] != before
            for output, before in zip(self.outputs, self._versions, strict=True)
        )

    def borders(self) -> tuple[str, ...]:
        """Per border: why the model cannot be cut there, or an empty string."""
        reasons = [""] * len(self.order)
        for token, (last, reader) in self.reads.items():
            for border in range(token.first_bad_border(), min(last + 1, len(self.order))):
                reasons[border] = reasons[border] or token.said(reader)
        return tuple(reasons)

    def leaks(self) -> tuple[str, ...]:
        """Returns what is read of blocks otherwise than by the next one of what the one before returned."""
        blocks = set(self.order)
        return tuple(token.said(reader) for token, (_, reader) in self.reads.items() if token.source in blocks)


def outer_modules(model: nn.Module, blocks: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of every module that is neither a block, nor in one, nor an ancestor of one."""
    names = list(blocks)
    inside = set(names)
    ancestors = {""} | {name[:i] for name in names for i, letter in enumerate(name) if letter == "."}
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if name in ancestors or name in inside:
            continue
        if any(name[:i] in inside for i, letter in enumerate(name) if letter == "."):
            continue
        found.append((name, module))
    return found
