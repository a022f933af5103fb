"""Weights: model.safetensors (or shards and an index) written as a stream and read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.nn import Module

from fold3d.checkpoint.arrivals import Entry
from fold3d.checkpoint.names import tied_groups
from fold3d.checkpoint.safetensors_file import SafetensorsWriter
from fold3d.errors import CheckpointError
from fold3d.weights import pretrained
from fold3d.weights.parts import Parts

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_SIZE = "50GB"
"""The stock `save_pretrained` default."""


class WeightsSink:
    """Writes the tensors of a `Stream` into a folder; holds none of them in memory.

    Files get their final names once all of their tensors are there, the index last.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """`prepare` is called before the first file is written; what it raises is raised like a write error."""
        self._folder, self._max_shard_size, self._prepare = folder, max_shard_size, prepare
        self._writers: dict[str, SafetensorsWriter] = {}
        self._file_of: dict[str, str] = {}
        self._index: dict[str, Any] | None = None

    def open(self, entries: Mapping[str, Entry], notes: list[Any]) -> None:
        """Opens every file with its full header."""
        shapes = {name: torch.empty(e.shape, dtype=e.dtype, device="meta") for name, e in entries.items()}
        split = split_torch_state_dict_into_shards(
            shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=self._max_shard_size
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._prepare is not None:
            self._prepare()
        self._file_of = dict(split.tensor_to_filename)
        for file, names in split.filename_to_tensors.items():
            inside = {name: entries[name] for name in names}
            self._writers[file] = SafetensorsWriter(self._folder / file, inside)
        if split.is_sharded:
            total = sum(tensor.numel() for tensor in shapes.values())
            self._index = {
                "metadata": {"total_parameters": total, **split.metadata},
                "weight_map": self._file_of,
            }

    def write(self, name: str, tensor: Tensor) -> None:
        """Stores one tensor."""
        self._writers[self._file_of[name]].write(name, tensor)

    def close(self) -> None:
        """Completes the files and removes weight files of an earlier save that are not part of this one."""
        for writer in self._writers.values():
            writer.close()
        index = self._folder / INDEX
        if self._index is not None:
            index.write_text(json.dumps(self._index, indent=2, sort_keys=True) + "\n")
        else:
            index.unlink(missing_ok=True)
        for path in [self._folder / FILE, *self._folder.glob("model-?????-of-?????.safetensors")]:
            if path.name not in self._writers:
                path.unlink(missing_ok=True)


class HostSink:
    """Keeps the tensors of a `Stream` in host memory: for formats that need all of them at once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def open(self, entries: Mapping[str, Entry], notes: list[Any]) -> None:
        """Nothing to prepare."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Keeps a copy of one tensor."""
        self.tensors[name] = tensor.detach().cpu().clone()

    def close(self) -> None:
        """Nothing to complete."""


def load_weights(model: Module, targets: Mapping[str, Tensor], folder: Path, parts: Parts | None = None) -> None:
    """Fills `targets` in place from the safetensors files in `folder`; reads only those tensors.

    Args:
        model: whose names the folder has; tied tensors may lie under any of their names.
        targets: parameters and buffers of this rank by canonical name, any device and dtype.
        parts: which part of each parameter the targets are; None: all of it.
    Raises: CheckpointError naming the tensors the folder does not hold or holds in another shape.
    """
    groups = {names[0]: tuple(names) for names in tied_groups(model)}
    missing = sorted(set(targets) - pretrained.load(model, targets, groups, folder, parts))
    if missing:
        raise CheckpointError(
            f"{folder} belongs to another model: it does not hold {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
