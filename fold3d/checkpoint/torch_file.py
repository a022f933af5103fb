"""TorchFile: a file of torch.save whose tensors are read and written one at a time, or in parts, where they lie.

It is not mapped: mapped pages would count as this process's memory, and one that cannot be written ends the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fold3d.comms.family import as_bytes
from fold3d.errors import CheckpointError
from fold3d.sharding.shard import Shard
from fold3d.weights.part_reader import read_part


class TorchFile:
    """What `torch.save` wrote, in its zip format, open until the end of the context.

    Attributes:
        content: the saved structure; its tensors have dtype, shape and strides, but no values.
    Raises: CheckpointError for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with FakeTensorMode():
                self.content: Any = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._descriptor = -1

    @contextlib.contextmanager
    def opened(self, *, writes: bool = False) -> Iterator[None]:
        """Lets `read`, or `write`, be called in the body."""
        with open(self._path, "r+b" if writes else "rb", buffering=0) as file:
            self._descriptor = file.fileno()
            yield

    def read(self, like: Tensor, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """Returns the values of a tensor of `content`, or a rank's part of them; reads no more.

        Raises: CheckpointError when the file ends before.
        """
        try:
            if like.is_contiguous():
                part = torch.empty(like.shape if shard is None else shard.shape(like.shape, rank), dtype=like.dtype)
                read_part(self._descriptor, self._place(like), part, shard, rank)
                return part
            # Laid out otherwise, such as channels last: as many elements as from its first to its last one.
            extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
            flat = torch.empty(extent, dtype=like.dtype)
            read_part(self._descriptor, self._place(like), flat)
            whole = flat.as_strided(like.shape, like.stride())
            return whole if shard is None else shard.take(whole, rank)
        except EOFError as error:
            raise CheckpointError(f"{self._path} is cut short: {error}") from error

    def read_all(self, value: Any) -> Any:
        """Returns a piece of `content` with the values of all tensors in it."""
        return tree_map_only(Tensor, self.read, value)

    def write(self, like: Tensor, values: Tensor) -> None:
        """Sets the values of a contiguous tensor of `content`."""
        data, place = as_bytes(values.cpu()).numpy().data, self._place(like) if like.numel() else 0
        while data:
            count = os.pwrite(self._descriptor, data, place)
            data, place = data[count:], place + count

    def _place(self, like: Tensor) -> int:
        """Returns where in the file a tensor begins."""
        storage: Any = like.untyped_storage()
        begin: int = storage._checkpoint_offset  # which torch.load notes for fake tensors
        return begin + int(like.storage_offset()) * like.element_size()
