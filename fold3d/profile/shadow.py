"""TrainingShadow: a copy of a model on tensors without values, whose training step is run for what it would need."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fold3d.device import rng_untouched
from fold3d.trace.arguments import Arguments
from fold3d.trace.capture import fake, fake_copy
from fold3d.trace.without_values import WithoutValues


class TrainingShadow:
    """Neither the model nor random numbers are touched; no process group is used."""

    def __init__(self, model: nn.Module, micro_batch: Mapping[str, Any], device: torch.device | str = "cpu") -> None:
        """Args:
        model: whole; parameters of any device.
        micro_batch: keyword arguments of the model's forward; values matter where the model decides by them.
        device: whose kernels are chosen; of a kind that this torch knows.
        """
        device = torch.device(device)
        if device.type == "cpu":  # accelerate calls it cpu:0; tensors that a model makes there have no number
            device = torch.device("cpu")
        self._device, self.mode = device, WithoutValues()
        self.model = fake_copy(model, self.mode, device).train()
        self.batch: dict[str, Any] = {
            name: tree_map_only(Tensor, lambda tensor: fake(tensor, self.mode, device), value)
            for name, value in micro_batch.items()
        }
        """The micro-batch, without values; the copy knows those by which the model decides."""
        self.mode.known.give(self.batch, micro_batch)
        self._packs = _packs(micro_batch.get("position_ids"))
        self._called: Callable[..., Any] = self.model
        if isinstance(micro_batch, Arguments):
            self._called = micro_batch.called(self.model)
        called: Any = self._called
        if "use_cache" in inspect.signature(called.forward).parameters:
            self.batch.setdefault("use_cache", False)

    @contextmanager
    def training(self) -> Iterator[None]:
        """In its body operations are those of the copy."""
        with ExitStack() as stack:
            stack.enter_context(rng_untouched(self._device))
            if not self._packs:
                stack.enter_context(_one_sequence_a_row())
            stack.enter_context(self.mode)
            yield

    def call(self) -> Any:
        """Returns what the forward does, in the body of `training`. Raises: whatever it raises without values."""
        return self._called(**self.batch)


def _packs(positions: object) -> bool:
    """Whether positions [batch, tokens] say that a row holds several sequences."""
    if not isinstance(positions, Tensor) or positions.is_meta or positions.ndim != 2:
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def has_memory(value: object) -> bool:
    """Whether it is a tensor with memory of its own; how large a sparse one is, only its values say."""
    return isinstance(value, Tensor) and value.layout == torch.strided


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """In its body transformers takes rows for one sequence each.

    Whether they are several it reads off position_ids; without values it would take that for granted, and every block
    would keep a mask.
    """
    masks = sys.modules.get("transformers.masking_utils")
    found = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or found is None:
        yield
        return
    vars(masks)["find_packed_sequence_indices"] = lambda *_, **__: None
    try:
        yield
    finally:
        vars(masks)["find_packed_sequence_indices"] = found
