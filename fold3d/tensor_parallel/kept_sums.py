"""KeptSums: what TP.sync has summed in an activation checkpoint is kept, so that recomputation communicates nothing."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint
from fold3d.tensor_parallel.region import RegionOps


class KeptSums:
    """RegionOps over others (Merak, section 5.3, where recomputation would double TP.sync).

    It costs two activations of a layer's input for each layer that is checkpointed. Sums are told apart by the
    checkpoint that they are in and their order there, so the code in it must run again as it ran.
    """

    def __init__(self, ops: RegionOps) -> None:
        self.size, self.rank = ops.size, ops.rank
        self._ops = ops
        self._kept: WeakKeyDictionary[object, list[Tensor]] = WeakKeyDictionary()
        self._replayed: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()  # backward, sums so far

    def copy_to_region(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        return self._ops.copy_to_region(x, channels)

    def copy_weight(self, weight: Tensor, dim: int, indices: Tensor) -> Tensor:
        return self._ops.copy_weight(weight, dim, indices)

    def reduce_from_region(self, y: Tensor) -> Tensor:
        frame = frame_of_checkpoint()
        if frame is None:
            return self._ops.reduce_from_region(y)
        backward = torch._C._current_graph_task_id()
        kept = self._kept.get(frame)
        if backward != -1 and kept is not None:
            of, number = self._replayed.get(frame, (backward, 0))
            number = number if of == backward else 0
            self._replayed[frame] = (backward, number + 1)
            y.detach().copy_(kept[number])
            return y
        summed = self._ops.reduce_from_region(y)
        if torch.is_grad_enabled():
            # A copy: the model may add to what it gets in place.
            self._kept.setdefault(frame, []).append(summed.detach().clone())
        return summed
