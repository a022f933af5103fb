"""make_file(): a safetensors file at its size, without the tensors' bytes; and the check of such a file.

For the format see `fold3d/weights/safetensors_file.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fold3d.checkpoint.regions import Entry
from fold3d.weights.safetensors_file import DTYPES, read_header

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_NAMES)}


def make_file(path: Path, entries: Mapping[str, Entry]) -> dict[str, int]:
    """Makes a file with its header and room for its tensors; returns where each tensor's first byte belongs.

    Args:
        entries: dtype and shape of every tensor, by name.
    Raises: ValueError for a dtype the format does not know, OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, entry in entries.items():
        if entry.dtype not in _NAMES:
            raise ValueError(f"{name} is {entry.dtype}, which safetensors cannot store")
    end = 0
    # The library's order, widest elements first: every tensor is then aligned to its own element size.
    for name, entry in sorted(entries.items(), key=lambda item: (_ORDER[item[1].dtype], item[0])):
        begin, end = end, end + entry.bytes
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in entries}


def defect(path: Path) -> str | None:
    """Returns what is wrong with a safetensors file judged by its header and size, None when nothing is."""
    try:
        read_header(path)
    except ValueError as error:
        return str(error)
    return None
