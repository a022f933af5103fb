"""Shadow: a copy of a model whose tensors have shapes but no values. It is called once for each question about the
model; observers ride on the calls.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from fold3d.device import rng_untouched
from fold3d.errors import TraceError
from fold3d.trace.arguments import Arguments
from fold3d.trace.caches import apart_from_caches
from fold3d.trace.coat import copy_without_coat
from fold3d.trace.compound import compute_as_linear, holders, prepare_copy
from fold3d.trace.without_values import WithoutValues
from fold3d.trace.wrappers import drop_hooks, is_users, users_hooks, whole_shape

T = TypeVar("T")


class UncopiableError(TraceError):
    """The model holds something, now, of which there is no copy."""


class Shadow:
    """A copy in training mode. The model and random numbers are not touched, no process group is used.

    Attributes:
        of: the model.
        mode: of its tensors.
        model: the copy. Hooks, forwards and whatever else a question puts on it, or a call changes, go with the
            question (`ask`).
    """

    def __init__(self, model: nn.Module, device: torch.device | str = "cpu") -> None:
        """Args:
        model: whole; parameters of any device.
        device: whose kernels are chosen; of a kind that this torch knows.
        """
        self.of, self._device = model, _numberless(device)
        self.mode = WithoutValues()
        self.model = fake_copy(model, self.mode, self._device).train()
        self._contents = _Contents(self.model)
        self.is_asked = False
        """Whether a question is under way."""

    @contextmanager
    def ask(self) -> Iterator[Shadow]:
        """Around a question: the copy is as the model is, and will be again."""
        self.is_asked = True
        try:
            yield self
        finally:
            self.is_asked = False
            self._contents.restore()
            self.mode.forget()

    def arguments(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call, without values; the copy knows those by which the model decides.

        Args:
            example: keyword arguments of the model's forward, or `Arguments` of one of its modules; tensors of any
                device.
        """
        made: dict[str, Any] = {
            name: tree_map_only(Tensor, lambda tensor: fake(tensor, self.mode, self._device), value)
            for name, value in example.items()
        }
        self.mode.known.give(made, example)
        called = example.called(self.model) if isinstance(example, Arguments) else self.model
        if "use_cache" in inspect.signature(called.forward).parameters:
            made.setdefault("use_cache", False)
        return Arguments.of(example.module if isinstance(example, Arguments) else "", made)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Returns what the forward does, in the body of `running`. Raises: whatever it raises without values."""
        called = arguments.called(self.model) if isinstance(arguments, Arguments) else self.model
        return called(**arguments)

    @contextmanager
    def running(self, *, checkpoints: bool = False) -> Iterator[None]:
        """In its body operations are those of the copy.

        Args:
            checkpoints: whether transformers' gradient checkpointing does what it does in the model; else it is off.
        """
        for module in () if checkpoints else self.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                setattr(module, "gradient_checkpointing", False)  # noqa: B010 (no Tensor and no Module)
        with ExitStack() as stack:
            stack.enter_context(rng_untouched(self._device))
            stack.enter_context(apart_from_caches(self.model))
            stack.enter_context(self.mode)
            yield


_SHARED: ContextVar[dict[type, list[Any]] | None] = ContextVar("fold3d_shared", default=None)


@contextmanager
def shared_shadows() -> Iterator[None]:
    """In its body one copy of a model serves all questions about it, of each kind of device, and what was found out
    with it serves all who ask again (`shared`). Nobody changes the model, or an example, meanwhile."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


def shared(kind: type[T]) -> list[T]:
    """Returns what there is of a kind in the body of `shared_shadows`, to be added to; outside of it nobody keeps what
    is added."""
    known = _SHARED.get()
    return [] if known is None else known.setdefault(kind, [])


@contextmanager
def shadow_of(model: nn.Module, device: torch.device | str = "cpu") -> Iterator[Shadow]:
    """Around one question: yields a copy of `model`, or one that answered others (`shared_shadows`)."""
    copies, device = shared(Shadow), _numberless(device)
    known = next((one for one in copies if one.of is model and one._device == device and not one.is_asked), None)
    if known is None:
        known = Shadow(model, device)
        copies.append(known)
    with known.ask():
        yield known


def _numberless(device: torch.device | str) -> torch.device:
    """accelerate calls the host cpu:0; tensors that a model makes there have no number."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cpu" else device


class _Contents:
    """Of a copy: what its modules hold, and containers and plain objects in them, at the time this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[Any, list[Any]]] = []
        self._parameters = [(one, one.dtype, one.requires_grad) for one in model.parameters()]
        seen = set[int]()
        todo: list[Any] = [vars(module) for module in model.modules()]
        while todo:
            one = todo.pop()
            if id(one) in seen or isinstance(one, _NOTHING_INSIDE):
                continue
            seen.add(id(one))
            if isinstance(one, (dict, list, set, deque)):
                self._held.append((one, _contents_of(one)))
                todo += self._held[-1][1]
            elif isinstance(one, (tuple, frozenset)):
                todo += one
            elif type(getattr(one, "__dict__", None)) is dict:
                todo.append(one.__dict__)

    def restore(self) -> None:
        """Makes all what it was."""
        for held, before in self._held:
            now = _contents_of(held)
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                _fill(held, before)
        for parameter, dtype, requires_grad in self._parameters:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
            parameter.grad = None
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


_NOTHING_INSIDE = (
    Tensor, str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Size,
    FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.Generator,
)  # fmt: skip


def _contents_of(held: Any) -> list[Any]:
    """Returns what is in a container, of a dictionary the keys and behind them the values."""
    if isinstance(held, dict):
        kind = OrderedDict if isinstance(held, OrderedDict) else dict
        return [*kind.keys(held), *kind.values(held)]
    return list(held)


def _fill(held: Any, contents: list[Any]) -> None:
    """Puts into a container what `_contents_of` returned. Its own class may forbid what the basic one does."""
    if isinstance(held, dict):
        kind = OrderedDict if isinstance(held, OrderedDict) else dict
        kind.clear(held)
        count = len(contents) // 2
        for key, value in zip(contents[:count], contents[count:], strict=True):
            kind.__setitem__(held, key, value)
    elif isinstance(held, set):
        set.clear(held)
        set.update(held, contents)
    else:
        list_like: Any = list if isinstance(held, list) else deque
        list_like.clear(held)
        list_like.extend(held, contents)


@contextmanager
def one_sequence_a_row(example: Mapping[str, Any]) -> Iterator[None]:
    """In its body transformers takes rows for one sequence each, unless positions in `example` say that they are more.

    It reads that off position_ids; without values it would take several for granted, and every block would keep a mask.
    """
    masks = sys.modules.get("transformers.masking_utils")
    found = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or found is None or _packs(example.get("position_ids")):
        yield
        return
    vars(masks)["find_packed_sequence_indices"] = lambda *_, **__: None
    try:
        yield
    finally:
        vars(masks)["find_packed_sequence_indices"] = found


def _packs(positions: object) -> bool:
    """Whether positions [batch, tokens] say that a row holds several sequences."""
    if not isinstance(positions, Tensor) or positions.is_meta or positions.ndim != 2:
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def fake_copy(model: nn.Module, mode: FakeTensorMode, device: torch.device | str = "cpu") -> nn.Module:
    """Returns a copy of `model` with fake tensors on `device` as parameters, buffers and attributes.

    It has no hooks of the user's: they would keep, print or count what no training has computed.
    """
    memo: dict[int, Any] = {}
    frozen: list[nn.Parameter] = []
    for module in model.modules():
        memo.update((id(hook), hook) for hook in users_hooks(module))  # of objects that may be too large to copy
        tensors = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                made = memo[id(tensor)] = fake(tensor, mode, device)
                if isinstance(made, nn.Parameter) and not made.requires_grad and made.is_floating_point():
                    made.requires_grad_()  # a copy's `__setstate__` may give it hooks
                    frozen.append(made)
    compound = list(holders(model))
    for _, module in compound:
        prepare_copy(module, memo)
    try:
        shadow = copy_without_coat(model, memo)
    except Exception as error:
        raise UncopiableError(
            f"{type(model).__name__} cannot be copied for recording ({type(error).__name__}: {error}). "
            "Remove what copy.deepcopy cannot copy (locks, open files, generators) from its attributes."
        ) from error
    for parameter in frozen:
        parameter.requires_grad_(False)
    for module in shadow.modules():
        drop_hooks(module, is_users)

    def weight(shape: tuple[int, int], dtype: torch.dtype) -> nn.Parameter:
        made: Any = fake(nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), False), mode, device)
        return made  # type: ignore[no-any-return]

    for name, _ in compound:
        compute_as_linear(shadow.get_submodule(name), weight)
    return shadow


def fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str = "cpu") -> Tensor:
    """Returns a tensor like `tensor` without values; a parameter for a parameter, whole where that holds a part."""
    made = without_values(tensor, mode, device)
    if isinstance(tensor, nn.Parameter):
        made.requires_grad_(tensor.requires_grad)
        made._is_param = True  # all that nn.Parameter does to such a tensor, after a copy
    return made


def without_values(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str = "cpu") -> Tensor:
    """Returns a tensor like `tensor` that has neither values nor gradients; see `fake`.

    It is made as FakeTensorMode makes the result of torch.empty, without a dispatch: giant models have thousands.
    """
    whole = whole_shape(tensor)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # whatever is recorded meanwhile
        if whole == tensor.shape:
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        else:
            shape = torch.empty(whole, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, shape, torch.device(device))
