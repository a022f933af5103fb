"""SplitError: a chunk of a split model ran differently from what was recorded."""

from __future__ import annotations

from fold3d.errors import Fold3dError

WAYS_OUT = (
    "Set pp=1 and segments=1, where nothing is cut and all outputs are there; or use fewer chunks (pp * segments), or "
    "compute it from what the model returns at its end"
)
"""For who asks for what another chunk has."""


class SplitError(Fold3dError, RuntimeError):
    """A chunk ran otherwise than recorded; the message names the module, the reason and what to change."""
