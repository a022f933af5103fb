"""Numbers of parameters that the stock loop uses: the model's, not those of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import transformers.trainer
from torch.nn import Module

from fold3d.trace.capture import fake_copy
from fold3d.trace.without_values import WithoutValues


@contextlib.contextmanager
def counting_parameters(trainable: Callable[[], int]) -> Iterator[None]:
    """In its body the stock loop takes the number of trainable parameters from `trainable`."""
    module: Any = transformers.trainer
    stock = module.get_model_param_count

    def count(model: Any, trainable_only: bool = False) -> int:
        return trainable() if trainable_only else stock(model)

    module.get_model_param_count = count
    try:
        yield
    finally:
        module.get_model_param_count = stock


class WholeSizes:
    """The model as code sees it that counts its parameters, where this process has parts of them."""

    def __init__(self) -> None:
        self._copy: Module | None = None

    def of(self, model: Module) -> Module:
        """Returns a copy of `model`, without values whose parameters have the whole shapes; always the same one."""
        if self._copy is None:
            self._copy = fake_copy(model, WithoutValues())
        return self._copy
