"""TorchFile: a file of torch.save whose tensors are read one at a time, or in parts, where they lie.

It is not mapped: mapped pages would count as this process's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fold3d.checkpoint.regions import box_of, read_box
from fold3d.errors import CheckpointError


@contextlib.contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Raises CheckpointError for whatever torch says of a damaged file, or of one of the folder, in the body."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of a pickle with a wrong byte there is no end of kinds
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def without_values() -> FakeTensorMode:
    """Returns a context in which tensors have no values, and of which nothing stays: torch's cache of what operators
    return would keep a storage for every tensor of every checkpoint."""
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


class TorchFile:
    """What `torch.save` wrote, in its zip format, open until the end of the context.

    Attributes:
        content: the saved structure; its tensors have dtype, shape and strides, but no values.
    Raises: CheckpointError for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path), without_values():
            self.content: Any = torch.load(path, map_location="cpu", weights_only=True)
        self._descriptor = -1

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Lets values be read in the body."""
        with open(self._path, "rb", buffering=0) as file:
            self._descriptor = file.fileno()
            yield

    def read(self, like: Tensor) -> Tensor:
        """Returns the values of a tensor of `content`. Raises: CheckpointError when the file ends before."""
        if like.is_contiguous():
            data = torch.empty(like.shape, dtype=like.dtype)
            self.read_box(like, (0,) * like.ndim, data)
            return data
        # Laid out otherwise, such as channels last: as many elements as from its first to its last one.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        flat = torch.empty(extent, dtype=like.dtype)
        self._fill((extent,), like, (0,), flat)
        return flat.as_strided(like.shape, like.stride())

    def read_all(self, value: Any) -> Any:
        """Returns a piece of `content` with the values of all tensors in it."""
        return tree_map_only(Tensor, self.read, value)

    def read_box(self, like: Tensor, starts: Sequence[int], data: Tensor) -> None:
        """Fills `data`, in host memory, with the box of a tensor of `content` that begins at `starts`.

        Raises: CheckpointError when the file ends before.
        """
        if like.is_contiguous():
            self._fill(like.shape, like, starts, data)
        else:
            data.copy_(box_of(self.read(like), starts, data.shape))

    def _fill(self, shape: Sequence[int], like: Tensor, starts: Sequence[int], data: Tensor) -> None:
        try:
            read_box(self._descriptor, self.place(like), shape, starts, data)
        except EOFError as error:
            raise CheckpointError(f"{self._path} is cut short: {error}") from error

    def place(self, like: Tensor) -> int:
        """Returns where in the file a tensor of `content` with elements begins."""
        storage: Any = like.untyped_storage()
        begin: int = storage._checkpoint_offset  # which torch.load notes for fake tensors
        return begin + int(like.storage_offset()) * like.element_size()
