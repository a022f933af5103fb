"""Which weights code reads, and where it must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fold3d.errors import ConfigError

_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__


class Reads(TorchFunctionMode):
    """Takes down which parameters of a module something is computed from."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameters: set[str] = set()
        self._names = {id(one): name for name, one in module.named_parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs)):
            if id(one) in self._names and _computed(func, result, one):
                self.parameters.add(self._names[id(one)])
        return result


class RefusedReads(TorchFunctionMode):
    """Raises where something is computed from one of some parameters.

    Args:
        names: by the parameters' ids.
        refuses: whether it is an error now; asked only where one of them is read.
        error: makes it, of the name and the parameter.
    """

    def __init__(
        self, names: Mapping[int, str], refuses: Callable[[], bool], error: Callable[[str, Tensor], Exception]
    ) -> None:
        super().__init__()
        self._names, self._refuses, self._error = names, refuses, error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = next((one for one in tree_leaves((args, kwargs)) if id(one) in self._names), None)
        if read is None or not self._refuses():
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:  # such as a product with what has the shape of the whole weight
            raise self._error(self._names[id(read)], read) from error
        if _computed(func, result, read):
            raise self._error(self._names[id(read)], read)
        return result


def _computed(func: Any, result: Any, read: Any) -> bool:
    return func != _GRADIENT and any(isinstance(one, Tensor) and one is not read for one in tree_leaves(result))


class Unproved:
    """Modules and parameters of one block that were not used when it was proved how it is divided, such as an adapter
    that is switched on later.

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
        if not self._names:
            return nullcontext()
        return RefusedReads(
            self._names, self._has_parts, lambda name, _: self._error(f"its parameter {name!r} is read")
        )

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
