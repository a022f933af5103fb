"""converting(): modules that convert themselves in a forward, as by `self.classifier.to(torch.float32)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, no_grad
from torch.nn import Module

from fold3d.errors import TraceError


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
