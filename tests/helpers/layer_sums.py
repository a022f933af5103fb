"""How layers add up in memory, as csrc/core/plan/layout.h has it, with names for the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d import _C
from fold3d.plan.costs import LayerBytes, as_tuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What a chunk needs for one micro-batch, beside its inputs: as in csrc/core/memory/memory_model.h."""

    saved: int
    forward: int
    backward: int


def activations_of(layers: Sequence[LayerBytes], arriving: int) -> Activations:
    """Returns what consecutive layers need as one chunk.

    Args:
        arriving: bytes of the gradient that their backward begins with; 0 for the model's last chunk.
    """
    saved, forward, backward = _C.activations_of([as_tuple(layer) for layer in layers], arriving)
    return Activations(saved=saved, forward=forward, backward=backward)


def with_head_done(layers: Sequence[LayerBytes], ends: int) -> Activations:
    """Returns what the layers of the model's last chunk need where the backward of the head, the last one, is a part
    of the forward.

    Args:
        ends: bytes of what the last block returns, and of its gradient, which is kept in the place of all that the head
            saved.
    """
    saved, forward, backward = _C.with_head_done([as_tuple(layer) for layer in layers], ends)
    return Activations(saved=saved, forward=forward, backward=backward)


def recomputed(layer: LayerBytes, handed_on: int, sums: int = 0) -> LayerBytes:
    """Returns what a layer needs whose forward runs again in its backward: it keeps only what it hands on.

    Args:
        handed_on: bytes of the tensors that it returns: the next layer keeps them as its inputs.
        sums: of TP.sync, which are kept as well.
    """
    saved, outputs, forward, backward = _C.recomputed(as_tuple(layer), handed_on, sums)
    return LayerBytes(saved=saved, outputs=outputs, forward=forward, backward=backward)
