"""read_part(): a rank's part of a tensor that lies whole in a file, read without the rest of it."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from fold3d.sharding.shard import Shard

_PAGE = 4096
"""Bytes that a disk reads at once anyway: pieces at least as long are read one by one."""
_WINDOW = 1 << 22
"""Bytes of whole rows that are read at once where pieces are shorter."""


def read_part(descriptor: int, begin: int, part: Tensor, shard: Shard | None = None, rank: int = 0) -> None:
    """Fills a contiguous tensor in host memory from an open file.

    Of what is not the rank's nothing is read, except between pieces shorter than a page, a few megabytes at a time. The
    file is not mapped: mapped pages would count as this process's memory.

    Args:
        begin: place of the whole tensor's first byte in the file; row by row, of the part's dtype.
        shard: None: the part is the whole tensor.
        rank: whose part it is.
    Raises: EOFError when the file ends before, OSError.
    """
    if part.numel() == 0:
        return
    target = part.detach().reshape(-1).view(torch.uint8)
    if shard is None:
        fill(descriptor, target, begin)
        return
    step = math.prod(part.shape[shard.dim + 1 :]) * part.element_size()
    rows = target.view(math.prod(part.shape[: shard.dim]), -1)
    row_bytes = shard.size * step
    runs = [(first * step, end * step) for first, end in shard.parts[rank]]
    shortest = min(end - first for first, end in runs)
    if len(rows) == 1 or shortest >= _PAGE or row_bytes > _WINDOW:
        for number, row in enumerate(rows):
            place = 0
            for first, end in runs:
                fill(descriptor, row[place : place + end - first], begin + number * row_bytes + first)
                place += end - first
        return
    window = torch.empty((min(len(rows), _WINDOW // row_bytes), row_bytes), dtype=torch.uint8)
    for start in range(0, len(rows), len(window)):
        some = rows[start : start + len(window)]
        fill(descriptor, window[: len(some)].view(-1), begin + start * row_bytes)
        place = 0
        for first, end in runs:
            some[:, place : place + end - first] = window[: len(some), first:end]
            place += end - first


def fill(descriptor: int, target: Tensor, begin: int) -> None:
    """Reads as many bytes as `target`, flat and of bytes, has. Raises: EOFError when the file ends before."""
    view = target.numpy().data
    while view:
        count = os.preadv(descriptor, [view], begin)
        if count == 0:
            raise EOFError(f"the file ends {len(view)} bytes too early")
        view, begin = view[count:], begin + count
