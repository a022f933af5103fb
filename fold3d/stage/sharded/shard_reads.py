"""ShardReads: refuses code around the model's modules, such as a loss function, that reads weights of which a rank has
parts."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fold3d.errors import ConfigError
from fold3d.trace.wrappers import whole_shape

_CALL = nn.Module._call_impl.__code__
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__


class ShardReads:
    """Watches a loss function in every step: what it reads may depend on the step.

    What modules do with their weights was proved. A penalty on `model.parameters()` in a loss function, or a product
    with an embedding's weight, would see this rank's parts and be wrong without a word.

    Args:
        model: whose modules may read their weights while they run.
        parameters: canonical name -> parameter.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._modules = {id(module) for module in model.modules()}
        self._names = {id(one): name for name, one in parameters.items() if whole_shape(one) != one.shape}

    def watched(self) -> AbstractContextManager[Any]:
        """Around code of a loss function. Raises: ConfigError, in it, where something is read of which there is a
        part."""
        return _Watch(self._names, self._modules) if self._names else nullcontext()


class _Watch(TorchFunctionMode):
    """Raises where a tensor is computed from a parameter out of `names` by code outside of `modules`."""

    def __init__(self, names: Mapping[int, str], modules: Container[int]) -> None:
        super().__init__()
        self._names, self._modules = names, modules

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = next((one for one in tree_leaves((args, kwargs)) if id(one) in self._names), None)
        if read is None or func == _GRADIENT or self._in_a_module():
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:  # such as a product with what has the shape of the whole weight
            raise self._refused(read) from error
        if _computed(result, read):
            raise self._refused(read)
        return result

    def _in_a_module(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals.get("self")) in self._modules:
                return True
            frame = frame.f_back
        return False

    def _refused(self, read: Any) -> ConfigError:
        name = self._names[id(read)]
        return ConfigError(
            f"code around the model, such as a loss function, reads the weight '{name}', of which each rank of the "
            f"tensor-parallel group has a part ({tuple(read.shape)} of {tuple(whole_shape(read))}), so it would see "
            f"other values than on one process. Leave the weight whole with tp_plan={{'{_module_of(name)}': "
            "'replicate'}, put such a term into the optimizer (weight_decay is an L2 penalty), or set tp=1"
        )


def _computed(result: Any, read: Any) -> bool:
    return any(isinstance(one, Tensor) and one is not read for one in tree_leaves(result))


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name
