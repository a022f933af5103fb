"""SafetensorsWriter: one safetensors file, filled tensor by tensor; and the check of such a file.

For the format see `fold3d/weights/safetensors_header.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fold3d.checkpoint.arrivals import Entry
from fold3d.comms.family import as_bytes
from fold3d.weights.safetensors_header import DTYPES, read_header

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_NAMES)}


class SafetensorsWriter:
    """Writes to `path` + ".tmp" and renames in close(): the final name never holds half a file."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        """Opens the file and writes its header.

        Args:
            entries: dtype and shape of every tensor, by name.
        Raises: ValueError for a dtype the format does not know, OSError.
        """
        self._path, self._temporary = path, path.with_name(path.name + ".tmp")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        end = 0
        for name, entry in entries.items():
            if entry.dtype not in _NAMES:
                raise ValueError(f"{name} is {entry.dtype}, which safetensors cannot store")
        # The library's order, widest elements first: every tensor is then aligned to its own element size.
        for name, entry in sorted(entries.items(), key=lambda item: (_ORDER[item[1].dtype], item[0])):
            begin, end = end, end + entry.bytes
            header[name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [begin, end],
            }
            self._offsets[name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._missing = set(self._offsets)
        self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed in close()
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Stores `tensor` (any device) under `name`."""
        self._file.seek(self._data + self._offsets[name])
        self._file.write(as_bytes(tensor.cpu()).numpy().data)
        self._missing.discard(name)

    def close(self) -> None:
        """Gives the file its final name."""
        self._file.close()
        if self._missing:
            raise ValueError(f"{self._path.name}: no data for {sorted(self._missing)[:3]}")
        os.replace(self._temporary, self._path)


def defect(path: Path) -> str | None:
    """Returns what is wrong with a safetensors file judged by its header and size, None when nothing is."""
    try:
        read_header(path)
    except ValueError as error:
        return str(error)
    return None
