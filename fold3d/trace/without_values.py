"""WithoutValues: torch's FakeTensorMode, for models of any precision, that knows what follows from a batch alone;
and the modes beside it.

Liger's element-wise kernels are said by torch's operations: Triton needs memory. Shapes, dtypes and what reads what are
those of the kernels. Their fused losses are not here: they read the head's weight, which is another rank's (see
`chunked_loss`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, no_grad
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributions import Distribution
from torch.nn import Module, functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map_only

from fold3d.errors import TraceError
from fold3d.trace.known_values import MOST, KnownValues, compare_drawn


def _scaled(x: Tensor, weight: Tensor | None, *_: Any) -> Tensor:
    return x.clone() if weight is None else (x * weight).to(x.dtype)


def _rotated(query: Tensor, key: Tensor, cos: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    read = 0 * cos.sum().to(query.dtype)
    return query + read, key + read


_INSTEAD: Mapping[str, Callable[..., Any]] = {
    "LigerRMSNormFunction": _scaled,
    "LigerLayerNormFunction": lambda x, weight, bias, *_: _scaled(x, weight) + bias,
    "LigerSiLUMulFunction": lambda gate, up, *_: functional.silu(gate) * up,
    "LigerGELUMulFunction": lambda gate, up, *_: functional.gelu(gate) * up,
    "LigerRopeFunction": _rotated,
}
"""Class of `liger_kernel.ops` -> the like of what its `apply` computes."""


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """In its body Liger's functions, where they are imported, run no kernel."""
    ops = sys.modules.get("liger_kernel.ops")
    found = [(getattr(ops, name, None), instead) for name, instead in _INSTEAD.items()]
    patched: list[Any] = []
    for kind, instead in found:
        if kind is not None and "apply" not in vars(kind):
            kind.apply = staticmethod(instead)
            patched.append(kind)
    try:
        yield
    finally:
        for kind in patched:
            del kind.apply


_attention = torch.nn.functional.scaled_dot_product_attention
_fused = torch.ops.aten._scaled_dot_product_efficient_attention


class WholeAttention(TorchFunctionMode):
    """What is read and made, and the number of FLOPs, are the same. Divided, every block would take several times as
    long, and make a mask of the sequence's length squared."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Returns what the function returns."""
        kwargs = kwargs or {}
        if func is _attention:
            made = _whole(*args, **kwargs)
            if made is not None:
                return made
        return func(*args, **kwargs)


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Returns the result of attention; None where it is not of the usual form, of which torch shall judge."""
    shapes = query.shape, key.shape, value.shape
    heads = query.shape[1:2] == key.shape[1:2] or enable_gqa
    if any(len(one) != 4 or one[0] != query.shape[0] for one in shapes) or (is_causal and attn_mask is not None):
        return None
    if not heads or key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        return None
    made: Tensor = _fused(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
    return made.contiguous() if dropout_p else made  # as it lies where kernels draw no dropout, which most do not


@contextmanager
def converting() -> Iterator[None]:
    """Within this, `Module.to` and its like convert parameters without values in place, as they do others: the
    parameter stays the same object. torch itself would exchange the object, which fails for one that anybody knows.

    What changes nothing does nothing. Raises: TraceError, of the conversion, where it changes more than the dtype.
    """
    inherited = Module._apply
    Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module._apply = inherited  # type: ignore[method-assign]


def _apply(module: Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
    children: list[Any] = list(module.children()) if recurse else []
    for child in children:
        child._apply(convert)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with no_grad():
            converted = convert(parameter)
        if converted.shape != parameter.shape or converted.device != parameter.device:
            raise TraceError(
                f"the forward converts the parameter '{name}' of a {type(module).__name__} from "
                f"{_said(parameter)} to {_said(converted)}. Parameters stay where they are while fold3d trains them; "
                "convert the module before training, not in its forward."
            )
        if converted.dtype != parameter.dtype:
            parameter.data = converted
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


def _said(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


class WithoutMemory(TorchFunctionMode):
    """Does the like of operations that look into memory, or leave it as it is, with tensors that have none.

    `torch.tensor([0, one.max(), other.max()])`, and `x[rows, columns]` with lists of such numbers, look into the memory
    of the elements: these are stacked, which gives the same. What `torch.empty` returns is filled with zeros: nobody
    reads it before it is written to, and then it is known whether all that was written is.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Returns what the function returns."""
        kwargs = kwargs or {}
        if func is torch.tensor and args and _is_list_of_numbers(args[0]):
            made = _stack(args[0])
            wanted = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            made = made.to(**wanted) if wanted else made
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        if func in _PYTHON_INDEXING and isinstance(args[1], tuple):
            args = (args[0], tuple(_stack(one) if _is_list_of_numbers(one) else one for one in args[1]), *args[2:])
        filled = _FILLED.get(func)
        if filled is not None and "out" not in kwargs and kwargs.get("memory_format") in _USUAL:
            return filled(*args, **{name: value for name, value in kwargs.items() if name != "memory_format"})
        return func(*args, **kwargs)


_PYTHON_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_FILLED: Mapping[Any, Callable[..., Any]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}
_USUAL = (None, torch.preserve_format, torch.contiguous_format)


def _stack(numbers: Sequence[Any]) -> Tensor:
    tensors = [one.detach() if isinstance(one, Tensor) else torch.tensor(one) for one in numbers]
    dtype = functools.reduce(torch.promote_types, (one.dtype for one in tensors))
    return torch.stack([one.to(dtype) for one in tensors])


def _is_list_of_numbers(data: Any) -> bool:
    """Returns whether some of these numbers are tensors."""
    if not isinstance(data, (list, tuple)):
        return False
    numbers = all(isinstance(one, (bool, int, float)) or (isinstance(one, Tensor) and one.ndim == 0) for one in data)
    return numbers and any(isinstance(one, Tensor) for one in data)


_aten = torch.ops.aten

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What is raised where code decides on a value that is not known."""


class WithoutValues(FakeTensorMode):
    """Runs operations on shapes alone, also those whose shapes torch itself knows in some precisions only.

    Attributes:
        known: the values of those tensors that have any: nothing is computed from weights.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self.known = KnownValues()
        self._inside = False
        self._validated: list[bool] = []
        self._around: list[ExitStack] = []

    def __enter__(self) -> WithoutValues:
        """torch's distributions do not check what they are made of: that decides about nothing but an error."""
        self._validated.append(Distribution._validate_args)
        Distribution.set_default_validate_args(False)
        self._around.append(ExitStack())
        self._around[-1].enter_context(converting())
        self._around[-1].enter_context(without_kernels())
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._around.pop().__exit__(*raised)
        Distribution.set_default_validate_args(self._validated.pop())

    def forget(self) -> None:
        """Another call begins: no value is known any more."""
        self.known = KnownValues()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what the operation returns, without values."""
        kwargs = kwargs or {}
        if self._inside:  # a part of an operation
            return super().__torch_dispatch__(func, types, args, kwargs)
        rule = _SHAPES.get(func)
        if rule is not None:
            with self:
                return rule(*args, **kwargs)
        tensors = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        instead = self._by_values(func, tensors, args)
        if instead is not None:
            return instead
        return self._run(func, types, tensors, args, kwargs)

    def _run(self, func: Any, types: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        known = self.known.all_of(func, tensors, kwargs)
        self._inside, failure, result = True, None, None
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except NEEDS_VALUES as error:
            if not known:
                raise
            failure = error
        finally:
            self._inside = False
        if not known or sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)) > MOST:
            self.known.lose(func, args, kwargs)
            self.known.draw(func, result)
            self.known.fill(func, args, kwargs, result)
            return result
        try:
            values = self.known.compute(func, args, kwargs)
        except RuntimeError:
            # Whoever records may have another default dtype than whoever trains: what does not fit has no value.
            if failure is not None:
                raise failure from None
            self.known.lose(func, args, kwargs)
            return result
        if failure is not None:  # only its values tell of which shape it is
            result = tree_map_only(Tensor, self._like, values)
        self.known.note(func, args, kwargs, values, result)
        if failure is not None:
            self.known.count(result)
        return result

    def _by_values(self, func: Any, tensors: list[Tensor], args: Any) -> Any:
        """Returns the result of operations that ask for values; None for others."""
        if func is _aten._local_scalar_dense.default and self.known.of(args[0]) is not None:
            return self.known.read(args[0])
        if func is _aten.equal.default and all(self.known.of(one) is not None for one in tensors):
            with self:
                return args[0].shape == args[1].shape and bool(args[0].eq(args[1]).all())
        compared = compare_drawn(func, args)
        if compared is not None:
            with self:
                return torch.full(args[0].shape, compared)
        if func is _aten.masked_select.default and self.known.of(args[1]) is not None:
            with self:
                chosen, mask = torch.broadcast_tensors(args[0], args[1])  # type: ignore[no-untyped-call]
                return chosen[mask]
        if func in _INDEXING and any(map(self._is_known_mask, args[1])):
            with self:
                places = [place for one in args[1] for place in self._places(one)]
                return func(args[0], places, *args[2:])
        return None

    def _is_known_mask(self, index: Tensor | None) -> bool:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        return mask and index is not None and self.known.of(index) is not None

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        return list(index.nonzero().unbind(1)) if index is not None and self._is_known_mask(index) else [index]

    def _like(self, tensor: Tensor) -> Tensor:
        with self:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _grouped_mm(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Shapes of torch's grouped matrix product, of which torch itself knows those in bfloat16 only."""
    if one.ndim == 2 and other.ndim == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.shape[0], one.shape[0], other.shape[1])
    elif one.ndim == 2:
        shape = (one.shape[0], other.shape[2])
    elif other.ndim == 2:
        shape = (one.shape[1], other.shape[1])
    else:
        shape = (one.shape[0], one.shape[1], other.shape[2])
    return one.new_empty(shape, dtype=out_dtype or one.dtype)


def _ctc_loss(
    log_probabilities: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Shapes of torch's connectionist temporal classification. No forward reads the second one, which backward needs:
    how long the longest target is may not be known, and all of them together are longer."""
    steps, samples = log_probabilities.shape[0], log_probabilities.shape[1] if log_probabilities.ndim > 2 else 1
    longest = targets.shape[-1]
    return log_probabilities.new_empty(samples), log_probabilities.new_empty(samples, steps, 2 * longest + 1)


_SHAPES: dict[Any, Callable[..., Any]] = {
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss.Tensor: _ctc_loss,
}
if hasattr(_aten, "_grouped_mm"):
    _SHAPES[_aten._grouped_mm.default] = _grouped_mm
_INDEXING = frozenset({_aten.index.Tensor, _aten._unsafe_index.Tensor})
