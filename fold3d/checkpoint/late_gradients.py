"""late_gradients.safetensors: the gradients of the last step before the checkpoint, where gradient_delay=1 keeps them.

By canonical name, whole, as they are kept in memory, of what was used. The settings that they will be taken with are in
fold3d.json.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fold3d.checkpoint.arrivals import Entry
from fold3d.checkpoint.safetensors_file import SafetensorsWriter
from fold3d.errors import CheckpointError
from fold3d.weights.part_reader import read_part
from fold3d.weights.parts import Parts
from fold3d.weights.safetensors_header import DTYPES, read_header

FILE = "late_gradients.safetensors"


class LateGradientsSink:
    """Writes the tensors of a `Stream` into the file; holds none of them in memory."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._writer: SafetensorsWriter | None = None

    def open(self, entries: Mapping[str, Entry], notes: list[Any]) -> None:
        """Writes the header."""
        self._writer = SafetensorsWriter(self._path, entries)

    def write(self, name: str, tensor: Tensor) -> None:
        """Stores one gradient."""
        assert self._writer is not None
        self._writer.write(name, tensor)

    def close(self) -> None:
        """Gives the file its name."""
        assert self._writer is not None
        self._writer.close()


class LateGradientsFile:
    """The file in a checkpoint."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        """Args:
            parts: which part of each gradient is read.
        Raises: CheckpointError for a file that is missing or damaged.
        """
        self._path, self._parts = folder / FILE, parts
        try:
            self._header = read_header(self._path)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self._path} is missing, cut short or damaged: {error}") from error

    def fill(self, name: str, gradient: Tensor) -> bool:
        """Fills this rank's part of a parameter's gradient; returns whether the file has one.

        Raises: CheckpointError for one of another shape.
        """
        stored = self._header.get(name)
        if stored is None:
            return False
        whole = self._parts.whole_shape(name, gradient.shape)
        if tuple(stored.shape) != whole:
            raise CheckpointError(
                f"{self._path} belongs to another model: {name} has shape {tuple(stored.shape)} there, and {whole} here"
            )
        part = torch.empty(gradient.shape, dtype=DTYPES[stored.kind])
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            read_part(descriptor, stored.begin, part, self._parts.shard_of(name), self._parts.rank)
        finally:
            os.close(descriptor)
        gradient.copy_(part)
        return True
