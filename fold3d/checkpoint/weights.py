"""Weights: model.safetensors (or shards and an index), written and read in parts; late gradients, read in parts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.nn import Module

from fold3d.checkpoint.delivery import Location
from fold3d.checkpoint.names import tied_groups
from fold3d.checkpoint.regions import Entry
from fold3d.data_parallel.late.weight_versions import parameter_of
from fold3d.errors import CheckpointError
from fold3d.weights import pretrained
from fold3d.weights.parts import Parts
from fold3d.weights.pretrained import PretrainedFolder
from fold3d.weights.safetensors_file import DTYPES

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


STEM = "model"
MAX_SHARD_SIZE = "50GB"
"""The stock `save_pretrained` default."""
LATE_GRADIENTS = "late_gradients"
"""Stem of the file with the gradients of the last step before the checkpoint, where gradient_delay=1 keeps them.

By canonical name, whole, as they are kept in memory, of what was used. The settings that they will be taken with are in
fold3d.json. Versions of weights that later steps need are there, too: "NAME@1" is that of one update ago, and so on,
and "NAME@update1" what the last update added."""
_FILLING = ".tmp"
"""Behind the name of a file that is not complete."""


class WeightsFiles:
    """The weights' files of one save, see `Files`: one, or shards with an index, as `save_pretrained` divides them.

    Files get their final names once all of their tensors are there, the index last.
    """

    def __init__(
        self,
        folder: Path,
        stem: str = STEM,
        *,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Args:
        stem: of the files' names.
        prepare: is called before the first file is made.
        """
        self._stem = stem
        self.folder, self._max_shard_size, self._prepare = folder, max_shard_size, prepare
        self._made: list[str] = []
        self._index: dict[str, Any] | None = None

    def make(self, entries: Mapping[str, Entry], notes: list[Any]) -> dict[str, Location]:
        """Makes every file, under the name of its own that it has while it is filled."""
        shapes = {name: torch.empty(e.shape, dtype=e.dtype, device="meta") for name, e in entries.items()}
        split = split_torch_state_dict_into_shards(
            shapes, filename_pattern=f"{self._stem}{{suffix}}.safetensors", max_shard_size=self._max_shard_size
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.folder, self._stem)
        if self._prepare is not None:
            self._prepare()
        files = split.filename_to_tensors or {f"{self._stem}.safetensors": []}
        self._made = list(files)
        if split.is_sharded:
            total = sum(tensor.numel() for tensor in shapes.values())
            self._index = {
                "metadata": {"total_parameters": total, **split.metadata},
                "weight_map": dict(split.tensor_to_filename),
            }
        locations: dict[str, Location] = {}
        for file, names in files.items():
            begins = make_file(self.folder / (file + _FILLING), {name: entries[name] for name in names})
            locations |= {name: Location(file + _FILLING, begin) for name, begin in begins.items()}
        return locations

    def finish(self) -> None:
        """Names the files, and removes weight files of an earlier save that are not part of this one."""
        for name in self._made:
            os.replace(self.folder / (name + _FILLING), self.folder / name)
        file = f"{self._stem}.safetensors"
        index = self.folder / f"{file}.index.json"
        if self._index is not None:
            index.write_text(json.dumps(self._index, indent=2, sort_keys=True) + "\n")
        else:
            index.unlink(missing_ok=True)
        for path in [self.folder / file, *self.folder.glob(f"{self._stem}-?????-of-?????.safetensors")]:
            if path.name not in self._made:
                path.unlink(missing_ok=True)


def remove_unfinished(folder: Path, stem: str = STEM) -> None:
    """Removes weight files that a save which failed, or was killed, has not completed."""
    for path in folder.glob(f"{stem}*.safetensors{_FILLING}"):
        path.unlink(missing_ok=True)


def load_weights(model: Module, targets: Mapping[str, Tensor], folder: Path, parts: Parts | None = None) -> None:
    """Fills `targets` in place from the safetensors files in `folder`; reads only those tensors.

    Args:
        model: whose names the folder has; tied tensors may lie under any of their names.
        targets: parameters and buffers of this rank by canonical name, any device and dtype.
        parts: which part of each parameter the targets are; None: all of it.
    Raises: CheckpointError naming the tensors the folder does not hold or holds in another shape.
    """
    groups = {names[0]: tuple(names) for names in tied_groups(model)}
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # transformers': what the model makes itself
    missing = sorted(set(targets) - unsaved - pretrained.load(model, targets, groups, folder, parts))
    if missing:
        raise CheckpointError(
            f"{folder} belongs to another model: it does not hold {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )


def filling_late(folder: Path, parts: Parts) -> Callable[[str, Tensor], bool]:
    """Returns what fills this rank's part of a parameter's gradient, or of a version of it, from a checkpoint, and
    returns whether it is there; it raises CheckpointError for one of another shape.

    Args:
        parts: which part of each gradient is read.
    Raises: CheckpointError for a file that is missing or damaged.
    """
    source = PretrainedFolder(folder, LATE_GRADIENTS)
    names = set(source.keys())

    def fill(name: str, gradient: Tensor) -> bool:
        if name not in names:
            return False
        parameter = parameter_of(name)
        whole, found = parts.whole_shape(parameter, gradient.shape), source.shape(name)
        if found != whole:
            raise CheckpointError(
                f"{folder} belongs to another model: the late gradient of {name} has shape {found}, and {whole} here"
            )
        source.read_into(name, gradient, parts.shard_of(parameter), parts.rank)
        return True

    return fill
