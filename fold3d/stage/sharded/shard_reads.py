"""ShardReads: refuses code around the model's modules, such as a loss function, that reads weights of which a rank has
parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fold3d.errors import ConfigError
from fold3d.trace.wrappers import whole_shape

_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__


class ShardReads:
    """Watches a loss function in every step: what it reads may depend on the step.

    What modules do with their weights was proved. A penalty on `model.parameters()` in a loss function, or a product
    with an embedding's weight, would see this rank's parts and be wrong without a word.

    Args:
        parameters: canonical name -> parameter.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = {id(one): name for name, one in parameters.items() if whole_shape(one) != one.shape}

    @contextmanager
    def watched(self, inside: int = 0) -> Iterator[None]:
        """Around code of a loss function. Raises: ConfigError, in it, where something is read of which there is a part.

        Args:
            inside: of how many modules' calls it begins.
        """
        if not self._names:
            yield
            return
        depth = inside

        def enter(*_: Any) -> None:
            nonlocal depth
            depth += 1

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1

        entered = register_module_forward_pre_hook(enter)
        left = register_module_forward_hook(leave, always_call=True)
        try:
            with _Watch(self._names, lambda: depth == 0):
                yield
        finally:
            entered.remove()
            left.remove()


class _Watch(TorchFunctionMode):
    """Raises where a tensor is computed from a parameter out of `names` while `outside()`."""

    def __init__(self, names: Mapping[int, str], outside: Callable[[], bool]) -> None:
        super().__init__()
        self._names, self._outside = names, outside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._outside():
            return result
        read = next((one for one in tree_leaves((args, kwargs)) if id(one) in self._names), None)
        if read is None or func == _GRADIENT or not _computed(result, read):
            return result
        name = self._names[id(read)]
        raise ConfigError(
            f"code around the model, such as a loss function, reads the weight '{name}', of which each rank of the "
            f"tensor-parallel group has a part ({tuple(read.shape)} of {tuple(whole_shape(read))}), so it would see "
            f"other values than on one process. Leave the weight whole with tp_plan={{'{_module_of(name)}': "
            "'replicate'}, put such a term into the optimizer (weight_decay is an L2 penalty), or set tp=1"
        )


def _computed(result: Any, read: Any) -> bool:
    return any(isinstance(one, Tensor) and one is not read for one in tree_leaves(result))


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name
