"""WithoutValues: torch's FakeTensorMode, for models of any precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten


class WithoutValues(FakeTensorMode):
    """Runs operations on shapes alone, also those whose shapes torch itself knows in some precisions only."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what the operation returns, without values."""
        rule = _SHAPES.get(func)
        if rule is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        with self:
            return rule(*args, **(kwargs or {}))


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


_SHAPES: dict[Any, Callable[..., Any]] = {}
if hasattr(_aten, "_grouped_mm"):
    _SHAPES[_aten._grouped_mm.default] = _grouped_mm
