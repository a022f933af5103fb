"""LayerBytes: what a layer's forward and backward need in memory, and how layers add up to a chunk. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


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


def activations_of(layers: Sequence[LayerBytes], arriving: int) -> Activations:
    """Returns what consecutive layers need as one chunk.

    Args:
        arriving: bytes of the gradient that their backward begins with; 0 for the model's last chunk.
    """
    before = forward = backward = 0
    for layer in layers:
        forward = max(forward, before + layer.forward)
        backward = max(backward, before + layer.backward)
        before += layer.saved
    # What the last layer hands on is kept as the inputs of the next chunk, and counted there.
    own = before - (layers[-1].outputs if layers and arriving else 0)
    return Activations(saved=own, forward=forward, backward=max(own, backward - arriving))


def with_head_done(layers: Sequence[LayerBytes], ends: int) -> Activations:
    """Returns what the layers of the model's last chunk need where the backward of the head, the last one, is a part
    of the forward.

    Args:
        ends: bytes of what the last block returns, and of its gradient, which is kept in the place of all that the head
            saved.
    """
    body = activations_of(layers[:-1], ends)
    whole = activations_of(layers, 0)
    before_head = whole.saved - layers[-1].saved
    return Activations(
        saved=body.saved + ends,
        forward=max(whole.forward, before_head + layers[-1].backward),
        backward=body.backward + ends,
    )


def recomputed(layer: LayerBytes, handed_on: int, sums: int = 0) -> LayerBytes:
    """Returns what a layer needs whose forward runs again in its backward: it keeps only what it hands on.

    Args:
        handed_on: bytes of the tensors that it returns: the next layer keeps them as its inputs.
        sums: of TP.sync, which are kept as well.
    """
    backward = max(layer.backward, layer.forward) + sums
    return replace(layer, saved=handed_on + sums, outputs=handed_on, backward=backward)


def estimated(saved: int, handed_on: int) -> LayerBytes:
    """Returns what a layer needs of which only this is known: what its backward needs, and what it returns."""
    return LayerBytes(
        saved=saved, outputs=min(saved, handed_on), forward=saved + handed_on, backward=saved + 2 * handed_on
    )
