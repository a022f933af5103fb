"""A safetensors file: which tensors it has and where their bytes are; read_part(): a rank's shard of a tensor, read
without the rest of it.

Format (https://huggingface.co/docs/safetensors): 8 bytes N, little-endian; N bytes of JSON; the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from fold3d.sharding.shard import Shard

MAX_HEADER = 100_000_000  # the limit of the safetensors library
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
        "F32": torch.float32, "U32": torch.uint32, "I32": torch.int32,
        "BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16, "I16": torch.int16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
        "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    }
)  # fmt: skip
"""Name in the format -> dtype, in the library's order: widest elements first."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file."""

    kind: str
    """Its dtype by the format's name; what is in no `DTYPES` is left to the safetensors library."""
    shape: tuple[int, ...]
    begin: int
    """Of its bytes, row by row, counted from the first byte of the file."""


def read_header(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a file, by name.

    Raises: ValueError that says what is wrong with the file, judged by its header and size; OSError.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise ValueError(f"{path.name} has {size} bytes, less than its own header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            spans = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
            stored = {
                name: Stored(entry["dtype"], tuple(entry["shape"]), 8 + length + spans[name][0])
                for name, entry in header.items()
            }
            ends = [end for _, end in spans.values()]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"the header of {path.name} cannot be read") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes, its header says {expected}")
    for name, entry in stored.items():
        dtype, (first, end) = DTYPES.get(entry.kind), spans[name]
        if first < 0 or (dtype is not None and end - first != math.prod(entry.shape) * dtype.itemsize):
            raise ValueError(f"{path.name}: {name} has {end - first} bytes, which do not fit its shape")
    return stored


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
