"""Unproved: what a block did not run when it was proved how it is divided must not run where ranks have parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fold3d.errors import ConfigError


class Unproved:
    """Modules and parameters of one block, such as an adapter that is switched on later.

    They are whole on every rank. Where ranks compute parts, what they make would count once for each rank, or have
    another gradient on each.

    Args:
        block: which holds them.
        modules: names, relative to the block, of those that did not run.
        parameters: names of those that nothing read in modules that ran.
        has_parts: whether what runs now is computed by each rank for its share.
    """

    def __init__(
        self, block: nn.Module, modules: Sequence[str], parameters: Sequence[str], has_parts: Callable[[], bool]
    ) -> None:
        self._block, self._modules, self._has_parts = block, modules, has_parts
        self._names = {id(block.get_parameter(name)): name for name in parameters}

    def watch_modules(self) -> Iterator[Callable[[], None]]:
        """Yields what no longer watches the modules."""
        for name in self._modules:
            yield self._block.get_submodule(name).register_forward_pre_hook(self._refuse(name)).remove

    def watch_parameters(self) -> AbstractContextManager[Any]:
        """Around a forward of the block. Raises: ConfigError, in it."""
        return _Watch(self._names, self._has_parts, self._error) if self._names else nullcontext()

    def _refuse(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._has_parts():
                raise self._error(f"its module {name!r} runs")

        return hook

    def _error(self, what: str) -> ConfigError:
        return ConfigError(
            f"tp: {what} in a {type(self._block).__name__}, among what the ranks of the tensor-parallel group share. "
            "The first micro-batch (or the Engine's `example`), by which the block was divided and proved, did not use "
            "it. Have that use it, too, or set tp=1"
        )


class _Watch(TorchFunctionMode):
    """Raises where something is computed from a parameter out of `names` while `has_parts()`."""

    def __init__(
        self, names: dict[int, str], has_parts: Callable[[], bool], error: Callable[[str], ConfigError]
    ) -> None:
        super().__init__()
        self._names, self._has_parts, self._error = names, has_parts, error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._has_parts():
            read = next((one for one in tree_leaves((args, kwargs)) if id(one) in self._names), None)
            if read is not None and not _only_looks(func):
                raise self._error(f"its parameter {self._names[id(read)]!r} is read")
        return func(*args, **kwargs)


class Reads(TorchFunctionMode):
    """Takes down which parameters of a module are read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameters: set[str] = set()
        self._names = {id(one): name for name, one in module.named_parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _only_looks(func):
            self.parameters |= {self._names[id(one)] for one in tree_leaves((args, kwargs)) if id(one) in self._names}
        return func(*args, **kwargs)


def _only_looks(func: Any) -> bool:
    """Whether a function tells no values of a tensor: its type, its shape, where it lies."""
    return func in _LOOKS or (getattr(func, "__name__", "") == "__get__" and func not in _VALUES)


_LOOKS = frozenset(
    (Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.stride, Tensor.__len__)
)
_VALUES = frozenset(vars(torch._C.TensorBase)[name].__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag"))
