"""Site: a matrix product with a parameter of a block, wherever its code makes it; found by following views of
parameters through the block's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fold3d._C import note_product
from fold3d.tensor_parallel.operators import of_fold3d

_T = torch.Tensor


@dataclass(frozen=True, slots=True)
class Site:
    """A parameter as a matrix, by its name relative to the block. Others of its dimensions, if any, are experts."""

    weight: str
    out_dim: int
    in_dim: int
    outputs: int
    inputs: int
    bias: str | None

    @property
    def way(self) -> tuple[int, ...]:
        """How the matrix lies in the parameter."""
        return self.out_dim, self.in_dim, self.outputs, self.inputs

    @property
    def holder(self) -> str:
        """Name of the module that holds the parameter."""
        return self.weight.rpartition(".")[0]


@dataclass(slots=True)
class _ParameterView:
    """A tensor that is a parameter, seen otherwise: of each of its dimensions, which of the parameter's it is."""

    tensor: Tensor
    name: str
    dims: tuple[int | None, ...]


class SiteMode(TorchFunctionMode):
    """Hands each matrix product with a parameter to `product`, which returns what stands for its result.

    Args:
        parameters: the parameters that count, by name.
        product: called with the site, the other operand with its channels last, and the shape that the result has with
            its channels last; returns the result in that shape.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], product: Callable[[Site, Tensor, list[int]], Tensor]
    ) -> None:
        super().__init__()
        self._product = product
        self._views: dict[int, _ParameterView] = {}
        for name, parameter in parameters:
            self._follow(parameter, name, tuple(range(parameter.dim())))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        views = [self._view(arg) for arg in args[:3]]
        if any(view is not None for view in views) or any(self._view(v) is not None for v in kwargs.values()):
            if func in _PRODUCTS:
                with of_fold3d():
                    done = self._run_product(func, args, kwargs)
                if done is not None:
                    note_product(done, [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)])
                    return done
            elif views and views[0] is not None:
                return self._run_view(func, views[0], args, kwargs)
        return func(*args, **kwargs)

    def _view(self, value: Any) -> _ParameterView | None:
        found = self._views.get(id(value)) if isinstance(value, Tensor) else None
        return found if found is not None and found.tensor is value else None

    def _follow(self, tensor: Tensor, name: str, dims: tuple[int | None, ...]) -> None:
        self._views[id(tensor)] = _ParameterView(tensor, name, dims)

    # -- views --

    def _run_view(self, func: Any, view: _ParameterView, args: tuple[Any, ...], kwargs: Any) -> Any:
        index = args[1] if func is _T.__getitem__ and _chooses_rows(args[1]) else None
        if index is not None and not any(view.tensor.stride()):
            # Rows chosen by a tensor are copies, as large as the choice is long: of zeros without memory, the same do.
            result = view.tensor.new_zeros(1).expand(index.shape[0], *view.tensor.shape[1:])
            self._follow(result, view.name, view.dims)
            return result
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        dims = self._dims_after(func, view, args, kwargs, result)
        if dims is not None:
            self._follow(result, view.name, dims)
        return result

    def _dims_after(
        self, func: Any, view: _ParameterView, args: tuple[Any, ...], kwargs: Any, result: Tensor
    ) -> tuple[int | None, ...] | None:
        dims = view.dims
        if func in _SAME and result.shape == view.tensor.shape:
            return dims
        if func is _T.__getitem__:
            index = args[1]
            if _chooses_rows(index):
                return dims
            single = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
            return dims[1:] if single and result.dim() == len(dims) - 1 else None
        if func in _SELECT and args[1:2] == (0,):
            return dims[1:]
        if (func in _FLIP and len(dims) == 2) or func in _FLIP_LAST:
            return (*dims[:-2], dims[-1], dims[-2])
        if func in _TRANSPOSE:
            first, second = (kwargs.get(k, a) for k, a in zip(("dim0", "dim1"), (*args[1:3], None, None), strict=False))
            moved = list(dims)
            moved[first], moved[second] = moved[second], moved[first]
            return tuple(moved)
        if func is _T.permute:
            order = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            return tuple(dims[k] for k in order)
        return None

    # -- products --

    def _run_product(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        left, right, bias, flipped = _PRODUCTS[func](args, kwargs)
        weight, other = self._view(right), left
        on_left = False
        if weight is None:
            weight, other, on_left = self._view(left), right, True
            if func is torch.nn.functional.linear:
                return None
        if weight is None or len(weight.dims) < 2 or self._view(other) is not None:
            return None
        ins, outs = (weight.dims[-1], weight.dims[-2]) if flipped or on_left else (weight.dims[-2], weight.dims[-1])
        if ins is None or outs is None:
            return None
        matrix = weight.tensor
        in_size, out_size = (matrix.shape[-1], matrix.shape[-2]) if flipped or on_left else matrix.shape[-2:]
        x = other.movedim(-2, -1) if on_left and other.dim() > 1 else other
        if x.shape[-1] != in_size:
            return None  # the function itself raises
        held = self._view(bias)
        site = Site(weight.name, outs, ins, out_size, in_size, None if held is None else held.name)
        batch = list(x.shape[:-1])
        if func not in _WITHOUT_BATCH and len(weight.dims) > 2 and x.dim() > 2:
            batch = [*torch.broadcast_tensors(x[..., 0, 0], matrix[..., 0, 0])[0].shape, x.shape[-2]]  # type: ignore[no-untyped-call]
        result = self._product(site, x, [*batch, out_size])
        if bias is not None and held is None:
            result = result + bias
        return result.movedim(-1, -2) if on_left and other.dim() > 1 else result


def _chooses_rows(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() == 1 and index.dtype != torch.bool


def _plain(args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any, Any, bool]:
    left = args[0]
    right = args[1] if len(args) > 1 else next(v for k, v in kwargs.items() if k in ("other", "mat2"))
    return left, right, None, False


def _reversed(args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any, Any, bool]:
    return args[1], args[0], None, False


def _linear(args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any, Any, bool]:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    return given["input"], given["weight"], given.get("bias"), True


def _added(args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any, Any, bool]:
    if len(args) < 3 or kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        return None, None, None, False
    return args[1], args[2], args[0], False


_Operands = Callable[[tuple[Any, ...], Any], tuple[Any, Any, Any, bool]]
_PRODUCTS: dict[Any, _Operands] = {
    torch.nn.functional.linear: _linear,
    torch.matmul: _plain, torch.mm: _plain, torch.bmm: _plain, _T.matmul: _plain, _T.mm: _plain, _T.bmm: _plain,
    _T.__matmul__: _plain, _T.__rmatmul__: _reversed,
    torch.addmm: _added, _T.addmm: _added, torch._grouped_mm: _plain, torch.nn.functional.grouped_mm: _plain,
}  # fmt: skip
"""Functions that multiply by a matrix -> (left, right, what is added, whether the matrix is [out, in])."""
_WITHOUT_BATCH = frozenset({torch._grouped_mm, torch.nn.functional.grouped_mm})
_SAME = frozenset(
    {_T.to, _T.contiguous, _T.clone, _T.detach, _T.float, _T.double, _T.type_as, _T.type, torch.clone, _T.data.__get__}  # type: ignore[attr-defined]
)
_FLIP = frozenset({_T.t, torch.t, _T.T.__get__})  # type: ignore[attr-defined]
_FLIP_LAST = frozenset({_T.mT.__get__})  # type: ignore[attr-defined]
_TRANSPOSE = frozenset({_T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes})
_SELECT = frozenset({_T.select, torch.select})
