"""The number of trainable parameters that the stock loop logs: the model's, not that of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import transformers.trainer


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
