"""KeptSums: what TP.sync has summed in an activation checkpoint is kept, so that recomputation communicates nothing."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint
from fold3d.tensor_parallel.region import RegionOps
from fold3d.tensor_parallel.sequence.exchange import PART, Exchange


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
        kept = self._again()
        if kept is not None:
            y.detach().copy_(kept)
            return y
        summed = self._ops.reduce_from_region(y)
        self._keep(summed)
        return summed

    def exchange(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        if how.forward == PART:  # needs nobody
            return self._ops.exchange(x, how, known)
        kept = self._again()
        if kept is not None:
            return self._ops.exchange(x, how, kept.clone())
        made = self._ops.exchange(x, how, known)
        self._keep(made)
        return made

    def _again(self) -> Tensor | None:
        """Returns what was kept, where backward runs a checkpoint again."""
        frame = frame_of_checkpoint()
        backward = torch._C._current_graph_task_id()
        kept = None if frame is None else self._kept.get(frame)
        if frame is None or backward == -1 or kept is None:
            return None
        of, number = self._replayed.get(frame, (backward, 0))
        number = number if of == backward else 0
        self._replayed[frame] = (backward, number + 1)
        return kept[number]

    def _keep(self, made: Tensor) -> None:
        frame = frame_of_checkpoint()
        if frame is not None and torch.is_grad_enabled():
            # A copy: the model may add to what it gets in place.
            self._kept.setdefault(frame, []).append(made.detach().clone())
