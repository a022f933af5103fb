"""SplitError: a chunk of a split model ran differently from what was recorded."""

from __future__ import annotations

from fold3d.errors import Fold3dError


class SplitError(Fold3dError, RuntimeError):
    """A chunk ran otherwise than recorded; the message names the module, the reason and what to change."""
