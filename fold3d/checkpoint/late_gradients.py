"""late_gradients.safetensors: the gradients of the last step before the checkpoint, where gradient_delay=1 keeps them.

By canonical name, whole, as they are kept in memory, of what was used. The settings that they will be taken with are in
fold3d.json. Versions of weights that later steps need are there, too: "NAME@1" is that of one update ago, and so on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fold3d.checkpoint.delivery import Location
from fold3d.checkpoint.regions import Entry
from fold3d.checkpoint.safetensors_file import make_file
from fold3d.data_parallel.late.weight_versions import parameter_of
from fold3d.errors import CheckpointError
from fold3d.weights.part_reader import read_part
from fold3d.weights.parts import Parts
from fold3d.weights.safetensors_header import DTYPES, read_header

FILE = "late_gradients.safetensors"


class LateGradientsFiles:
    """The file of one save, see `Files`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, entries: Mapping[str, Entry], notes: list[Any]) -> dict[str, Location]:
        """Makes the file."""
        return {name: Location(FILE, begin) for name, begin in make_file(self.folder / FILE, entries).items()}

    def finish(self) -> None:
        """It has its name: the folder has none yet."""


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
        """Fills this rank's part of a parameter's gradient, or a version of it; returns whether the file has one.

        Raises: CheckpointError for one of another shape.
        """
        stored = self._header.get(name)
        if stored is None:
            return False
        parameter = parameter_of(name)
        whole = self._parts.whole_shape(parameter, gradient.shape)
        if tuple(stored.shape) != whole:
            raise CheckpointError(
                f"{self._path} belongs to another model: {name} has shape {tuple(stored.shape)} there, and {whole} here"
            )
        part = torch.empty(gradient.shape, dtype=DTYPES[stored.kind])
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            read_part(descriptor, stored.begin, part, self._parts.shard_of(parameter), self._parts.rank)
        finally:
            os.close(descriptor)
        gradient.copy_(part)
        return True
