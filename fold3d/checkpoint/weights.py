"""Weights: model.safetensors (or shards and an index) written as a stream and read tensor by tensor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor

from fold3d.checkpoint.safetensors_file import SafetensorsWriter
from fold3d.checkpoint.stream import Entry
from fold3d.errors import CheckpointError

logger = logging.getLogger(__name__)

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


def load_weights(folder: Path, targets: Mapping[str, Tensor], tied: Sequence[Sequence[str]]) -> None:
    """Fills `targets` in place from the safetensors files in `folder`; reads only those tensors.

    Args:
        targets: parameters and buffers of this rank by name, any device and dtype.
        tied: groups of names of one tensor; the file may hold it under any of them.
    Raises: CheckpointError naming the tensors the folder does not hold or holds in another shape.
    """
    file_of = _files(folder)
    aliases = {name: group for group in tied for name in group}
    missing = []
    with ExitStack() as opened, torch.no_grad():
        handles: dict[Path, Any] = {}
        for name, target in targets.items():
            stored = next((alias for alias in (name, *aliases.get(name, ())) if alias in file_of), None)
            if stored is None:
                missing.append(name)
                continue
            path = file_of[stored]
            if path not in handles:
                handles[path] = opened.enter_context(safe_open(path, framework="pt"))
            value = handles[path].get_tensor(stored)
            if value.shape != target.shape:
                raise CheckpointError(
                    f"{folder} belongs to another model: {stored} has shape {tuple(value.shape)} there and "
                    f"{tuple(target.shape)} here"
                )
            target.copy_(value)
    if missing:
        raise CheckpointError(
            f"{folder} belongs to another model: it does not hold {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )


def _files(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor in `folder`."""
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    if not (folder / FILE).is_file():
        raise CheckpointError(f"{folder} holds neither {FILE} nor {INDEX}")
    with safe_open(folder / FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / FILE)
