"""Which weights code reads, and where it must not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fold3d.errors import ConfigError
from fold3d.trace.coat import Coat, Wrap
from fold3d.trace.wrappers import whole_shape

_OF_TENSORS = vars(torch._C.TensorBase)
_GRADIENT: Any = _OF_TENSORS["grad"].__get__

_VALUES = {
    *(Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.equal, Tensor.allclose, torch.equal, torch.allclose),
    *(Tensor.is_nonzero, torch.is_nonzero, Tensor.__array__, Tensor.__contains__, Tensor.__bool__, Tensor.__float__),
    *(Tensor.__int__, Tensor.__index__, Tensor.__complex__),
}
"""What tells values of a tensor and returns none."""
_SIZES = {_OF_TENSORS["shape"].__get__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__}
"""What tells how large it is."""


class Reads(TorchFunctionMode):
    """Takes down which parameters of a module something is computed from, and whether from any of other modules."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameters: set[str] = set()
        self.others = False
        self._names = {id(one): name for name, one in module.named_parameters()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs)):
            if not isinstance(one, nn.Parameter) or not _computed(func, result, one):
                continue
            if id(one) in self._names:
                self.parameters.add(self._names[id(one)])
            elif one.requires_grad:
                self.others = True
        return result


class RefusedReads(TorchFunctionMode):
    """Raises where something is computed from one of some parameters; tells how large the whole one is.

    Args:
        names: by the parameters' ids.
        refuses: whether it is an error now to read the one of this name; asked only where one is read.
        error: makes it, of the name and the parameter.
    """

    def __init__(
        self, names: Mapping[int, str], refuses: Callable[[str], bool], error: Callable[[str, Tensor], Exception]
    ) -> None:
        super().__init__()
        self._names, self._refuses, self._error = names, refuses, error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = next((one for one in tree_leaves((args, kwargs)) if self._is_refused(one)), None)
        if read is None:
            return func(*args, **kwargs)
        if func in _SIZES:
            return func(torch.empty(whole_shape(read), device="meta"), *args[1:], **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:  # such as a product with what has the shape of the whole weight
            raise self._error(self._names[id(read)], read) from error
        if _computed(func, result, read):
            raise self._error(self._names[id(read)], read)
        return result

    def _is_refused(self, one: Any) -> bool:
        return id(one) in self._names and self._refuses(self._names[id(one)])


def _computed(func: Any, result: Any, read: Any) -> bool:
    if func == _GRADIENT:
        return False
    return func in _VALUES or any(isinstance(one, Tensor) and one is not read for one in tree_leaves(result))


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

    def watch_modules(self, coat: Coat) -> None:
        """Has the modules refuse to run."""
        for name in self._modules:
            coat.put(Wrap.UNPROVED, self._block.get_submodule(name), self._refuse(name))

    def watch_parameters(self) -> AbstractContextManager[Any]:
        """Around a forward of the block. Raises: ConfigError, in it."""
        if not self._names:
            return nullcontext()
        return RefusedReads(
            self._names, lambda _: self._has_parts(), lambda name, _: self._error(f"its parameter {name!r} is read")
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
