"""ShardReads: refuses code around the model's modules, such as a loss function, that reads weights of which a rank has
parts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from torch import Tensor, nn

from fold3d.errors import ConfigError
from fold3d.tensor_parallel.weight_reads import RefusedReads
from fold3d.trace.wrappers import whole_shape

_CALL = nn.Module._call_impl.__code__


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
        return RefusedReads(self._names, lambda: not self._in_a_module(), _error) if self._names else nullcontext()

    def _in_a_module(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals.get("self")) in self._modules:
                return True
            frame = frame.f_back
        return False


def _error(name: str, read: Tensor) -> ConfigError:
    return ConfigError(
        f"code around the model, such as a loss function, reads the weight '{name}', of which each rank of the "
        f"tensor-parallel group has a part ({tuple(read.shape)} of {tuple(whole_shape(read))}), so it would see "
        f"other values than on one process. Leave the weight whole with tp_plan={{'{_module_of(name)}': "
        "'replicate'}, put such a term into the optimizer (weight_decay is an L2 penalty), or set tp=1"
    )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name
