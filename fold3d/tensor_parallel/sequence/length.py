"""SequenceLength: how long the sequence is of which a rank has a part."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fold3d.errors import Fold3dError
from fold3d.sharding.shard import even_part
from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint


class SequenceLength:
    """Of the blocks that hand parts of a hidden state to each other; it may differ from one forward to the next.

    A part alone does not say it: sequences of 7 and of 8 both give the first of two ranks 4 rows. Every forward of the
    model begins with the first of these blocks, on every stage, so it is noted there. Where backward runs an activation
    checkpoint again, it is that of the forward of the checkpoint: of the same frame, or, in a reentrant one, which has
    none, of the forward that was given the same memory.
    """

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank
        self._now: int | None = None
        self._of_checkpoints: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._of_storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._by_rows: dict[int, set[int]] = {}

    def begin(self, length: int) -> None:
        """The first of the blocks was called with a whole hidden state of this length."""
        self._now = length
        first, end = even_part(length, self._size, self._rank)
        self._by_rows.setdefault(end - first, set()).add(length)

    def of(self, rows: int | None = None, *, given: Tensor | None = None, known: int | None = None) -> int:
        """Returns the length.

        Args:
            rows: of this rank's part, where the caller has one.
            given: what a block was given of the hidden state.
            known: the length of the call of a block in which the caller runs; None outside of one.
        Raises: Fold3dError when a part of a block in a reentrant checkpoint runs again and sequences of several lengths
            were seen.
        """
        frame = frame_of_checkpoint()
        if torch._C._current_graph_task_id() == -1:
            if self._now is None:
                raise Fold3dError("a block ran before the first one of the model, which is given the whole sequence")
            if frame is not None:
                self._of_checkpoints[frame] = self._now
            elif given is not None and not torch.is_grad_enabled():  # in a reentrant checkpoint, maybe
                self._keep(given, self._now)
            return self._now
        if frame is not None and frame in self._of_checkpoints:
            return self._of_checkpoints[frame]
        if known is not None:
            return known
        if given is not None and (kept := self._of_storages.get(given.untyped_storage()._cdata)) is not None:
            return kept[1]
        lengths = set().union(*self._by_rows.values()) if rows is None else self._by_rows.get(rows, set())
        if len(lengths) != 1:
            raise Fold3dError(
                "backward runs a part of a block in a reentrant torch.utils.checkpoint again, which does not say how "
                f"long its sequence was ({', '.join(map(str, sorted(lengths)))}); pass use_reentrant=False to "
                "checkpoint, set recompute=True instead, or sequence_parallel=False"
            )
        return next(iter(lengths))

    def _keep(self, given: Tensor, length: int) -> None:
        alive = {key: kept for key, kept in self._of_storages.items() if not kept[0].expired()}  # type: ignore[no-untyped-call]
        storage = given.untyped_storage()
        self._of_storages = alive | {storage._cdata: (StorageWeakRef(storage), length)}  # type: ignore[no-untyped-call]
