"""DoubleMode: code that computes in single precision, whatever it is given, computes in double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fold3d.splitting.probing.grouped import GROUPED, grouped_mm


class DoubleMode(TorchFunctionMode):
    """Norms and softmaxes of many models ask for float32; comparisons to 1e-10 want more.

    So do tensors that are made without a type, such as a mask of the scores' smallest number: while the mode is
    entered, that is double precision in the whole process. Grouped matrix products, which torch has none of in double
    precision, are made of single ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[torch.dtype] = []

    def __enter__(self) -> DoubleMode:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._before.pop())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double(*args[1:], **kwargs)
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        if func in GROUPED and args[0].dtype == torch.float64:
            func = grouped_mm
        return func(*args, **kwargs)
