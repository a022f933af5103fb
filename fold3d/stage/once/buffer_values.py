"""BufferValues: what a model's buffers hold, for a run that shall leave no traces."""

from __future__ import annotations

import torch
from torch import nn


class BufferValues:
    """Of the buffers that lie on this rank, at the time this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [(module, name, one) for module in model.modules() for name, one in module._buffers.items()]
        self._values = [
            (one, one.detach().clone()) for _, _, one in self._places if one is not None and not one.is_meta
        ]

    def restore(self) -> bool:
        """Returns whether anything has changed since, and makes it what it was."""
        changed = [(one, value) for one, value in self._values if not torch.equal(one, value)]
        moved = [place for place in self._places if place[0]._buffers.get(place[1]) is not place[2]]
        for one, value in changed:
            one.data.copy_(value)
        for module, name, buffer in moved:
            module._buffers[name] = buffer
        return bool(changed or moved)
