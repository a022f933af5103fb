"""The header of a safetensors file: which tensors it has, and where their bytes are.

Format (https://huggingface.co/docs/safetensors): 8 bytes N, little-endian; N bytes of JSON; the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

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
