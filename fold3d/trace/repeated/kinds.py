"""kinds_of(): which blocks of a model are made alike, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Like:
    """What a tensor is like, but for its values and its strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def like(leaf: Any) -> Any:
    """Returns a tensor's Like, and anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return Like(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)


def kinds_of(blocks: Sequence[nn.Module], work: Sequence[Any]) -> list[int]:
    """Returns a number per block, equal for those that are made alike: of the same modules with equal settings, but for
    whole numbers that count the blocks; and do the same.

    Args:
        work: what is known of what each does, such as FLOPs.
    """
    known: list[tuple[int, Any, list[int]]] = []
    found = []
    for place, (block, does) in enumerate(zip(blocks, work, strict=True)):
        made, numbers = _made_of(block)
        for kind, (first, other, others) in enumerate(known):
            offsets = {one - two for one, two in zip(numbers, others, strict=False)}
            if other == (made, does) and len(numbers) == len(others) and offsets <= {0, place - first}:
                found.append(kind)
                break
        else:
            found.append(len(known))
            known.append((place, (made, does), numbers))
    return found


def _made_of(block: nn.Module) -> tuple[list[Any], list[int]]:
    made: list[Any] = []
    numbers: list[int] = []
    for path, module in block.named_modules():
        tensors = [*module._parameters.items(), *module._buffers.items()]
        made.append((path, type(module), [(key, x if x is None else like(x)) for key, x in tensors]))
        for key, value in vars(module).items():
            if isinstance(value, (bool, float, str, type(None))):
                made.append((key, value))
            elif isinstance(value, int):
                made.append(key)
                numbers.append(value)
    return made, numbers
