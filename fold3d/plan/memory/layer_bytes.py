"""LayerBytes: what a layer's forward and backward need in memory; how layers add up (csrc/core/plan/layout.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fold3d import _C


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """What a layer needs for one micro-batch, parameters and their gradients aside."""

    saved: int
    """Kept from its forward to its backward."""
    outputs: int = 0
    """Those of `saved` that it hands on to the next layer."""
    forward: int
    """Most at any moment of its forward, beside what was there when it began; what it keeps included."""
    backward: int
    """Most at any moment of its backward, beside what the layers before it keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What a chunk needs for one micro-batch, beside its inputs: as in csrc/core/memory/memory_model.h."""

    saved: int
    forward: int
    backward: int


def as_tuple(layer: LayerBytes) -> tuple[int, int, int, int]:
    """Returns the numbers as csrc/core/plan takes them."""
    return layer.saved, layer.outputs, layer.forward, layer.backward


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


def estimated(saved: int, handed_on: int) -> LayerBytes:
    """Returns what a layer needs of which only this is known: what its backward needs, and what it returns."""
    return LayerBytes(
        saved=saved, outputs=min(saved, handed_on), forward=saved + handed_on, backward=saved + 2 * handed_on
    )
