"""BufferSync: buffers that training changes, such as BatchNorm's statistics, as DistributedDataParallel treats them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from fold3d.comms.tree_group import TreeGroup
from fold3d.faults.progress import Progress
from fold3d.stage.rank_model import RankModel
from fold3d.torch_private import version_of


class BufferSync:
    """Gives all replicas replica 0's buffers before a step, if any rank's have changed since they were last alike.

    In between each replica has its own: its evaluations, and the micro-batches of a step, go on with them. Whether any
    rank's have changed is asked along with another exchange of the step (`changed`, `agree`), so a model whose buffers
    stay as they are costs nothing.

    A change is seen by the buffer's version, or because another tensor has taken its place. What changes past the
    version counter (`buffer.data.copy_()`) is seen in the first step, and then taken for granted in all.
    """

    def __init__(self, cut: RankModel, data: TreeGroup, progress: Progress):
        """Args:
        data: the replicas of this rank's stage.
        """
        self._cut, self._data, self._progress = cut, data, progress
        self._due = True  # unless the ranks agree on something else
        self._unseen = False  # some change past the version counter
        self._values: dict[str, Tensor] | None = {}  # at the beginning of the first step, for as long as it lasts
        self._alike: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def begin(self) -> None:
        """A step begins; all replicas of the stage call."""
        if self._due:
            self._share()
            self._alike = {name: (weakref.ref(b), version_of(b)) for name, b in self._buffers()}
            if self._values is not None:
                self._values = {name: buffer.detach().clone() for name, buffer in self._buffers()}
        self._due = True

    def changed(self) -> bool:
        """Whether buffers of this rank may have changed since they were those of replica 0."""
        now = dict(self._buffers())
        if self._values is not None:
            self._unseen = any(
                name in now and self._is_alike(name, now[name]) and not torch.equal(_bits(value), _bits(now[name]))
                for name, value in self._values.items()
            )
            self._values = None
        return self._unseen or now.keys() != self._alike.keys() or not all(map(self._is_alike, now, now.values()))

    def agree(self, changed: bool) -> None:
        """Takes what `changed` said on any rank, the same on all replicas of the stage; before the next `begin`."""
        self._due = changed

    def _is_alike(self, name: str, buffer: Tensor) -> bool:
        tensor, version = self._alike.get(name, (None, -1))
        return tensor is not None and tensor() is buffer and version == version_of(buffer)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Returns what this rank's stage may change: not the buffers of modules that only another one runs."""
        for name, buffer in self._cut.model.named_buffers():
            if buffer.device.type != "meta" and self._cut.placement.stage_of_module(name) in (0, self._cut.stage):
                yield name, buffer

    def _share(self) -> None:
        mine = dict(self._buffers())
        if not mine:  # the same module on all replicas: nobody waits
            return
        values = {name: (b.shape, b.dtype, _bits(b).cpu()) for name, b in mine.items()} if self._data.is_first else None
        with self._progress.during("taking the buffers of replica 0", meets=True):
            first = self._data.share(values)
        if self._data.is_first:
            return
        with torch.no_grad():
            for name, buffer in mine.items():
                shape, dtype, bits = first.get(name, (None, None, None))
                # One of another shape is a cache that grows with this replica's own inputs; one that was made in
                # inference mode nobody can have written to.
                if bits is not None and (shape, dtype) == (buffer.shape, buffer.dtype) and not buffer.is_inference():
                    buffer.copy_(bits.view(dtype).view(shape))


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bytes of its elements, uint8 [bytes]: NaN is equal to itself, and each dtype can be sent."""
    return tensor.detach().resolve_neg().contiguous().view(-1).view(torch.uint8)
