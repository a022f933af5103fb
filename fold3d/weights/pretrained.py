"""PretrainedFolder: weights in a folder as `save_pretrained` writes it, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fold3d.errors import CheckpointError
from fold3d.trace.example import is_transformers_model

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class PretrainedFolder:
    """A folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names.

    Raises: CheckpointError if there is neither, or if a file is missing or damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self._files = self._read_index()

    def keys(self) -> list[str]:
        """Names of all tensors in the folder."""
        return list(self._files)

    def names_in(self, model: nn.Module) -> dict[str, str]:
        """Returns {name in `model`: name in the folder} for every parameter and buffer of the model that the
        folder has.

        Follows transformers' renamings of older checkpoints and the prefix of the base model ("transformer."
        in GPT-2), which may be there or not.
        """
        wanted = {n for n, _ in model.named_parameters(remove_duplicate=False)} | {n for n, _ in model.named_buffers()}
        renamings = _renamings(model)
        prefix = getattr(model, "base_model_prefix", "")
        found: dict[str, str] = {}
        for key in self._files:
            renamed = key
            for renaming in renamings:
                renamed = renaming.rename_source_key(renamed)[0]
            for name in (key, renamed, f"{prefix}.{renamed}", renamed.removeprefix(f"{prefix}.")):
                if name in wanted:
                    found[name] = key
                    break
        return found

    def read(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields (key, tensor) of each of `keys`, opening every file once and holding one tensor at a
        time."""
        by_file: dict[str, list[str]] = {}
        for key in keys:
            by_file.setdefault(self._files[key], []).append(key)
        for file, members in by_file.items():
            with _opened(self.path / file) as handle:
                for key in members:
                    part = handle.get_slice(key)
                    yield key, part[:] if part.get_shape() else handle.get_tensor(key)

    def _read_index(self) -> dict[str, str]:
        index = self.path / _INDEX
        if index.is_file():
            try:
                files: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
            missing = sorted({file for file in files.values() if not (self.path / file).is_file()})
            if missing:
                raise CheckpointError(f"{self.path}: {_INDEX} names {missing[0]}, which is not there")
            return dict(files)
        single = self.path / _SINGLE
        if not single.is_file():
            raise CheckpointError(
                f"{self.path} has neither {_SINGLE} nor {_INDEX}; pass a folder written by save_pretrained "
                "(weights in the .bin format must be saved again as safetensors)"
            )
        with _opened(single) as handle:
            return dict.fromkeys(handle.keys(), _SINGLE)


def load(
    model: nn.Module, tensors: Mapping[str, Tensor], groups: Mapping[str, tuple[str, ...]], folder: str | Path
) -> set[str]:
    """Copies the weights in `folder` into `tensors` and returns the names that were found.

    Args:
        tensors: real tensors of `model` to fill, by canonical name; values are converted to their dtype.
        groups: for each canonical name of a tied tensor all its names; any of them is looked for.
    Raises: CheckpointError if no name in the folder belongs to the model, or a shape differs.
    """
    source = PretrainedFolder(folder)
    known = source.names_in(model)
    if not known:
        raise CheckpointError(
            f"{source.path} has no weight of {type(model).__name__}: it has "
            f"{', '.join(source.keys()[:4])}, ...; pass the folder of a model of this architecture"
        )
    targets: dict[str, str] = {}
    for name in tensors:
        alias = next((alias for alias in groups.get(name, (name,)) if alias in known), None)
        if alias is not None:
            targets[known[alias]] = name
    for key, value in source.read(targets):
        tensor = tensors[targets[key]]
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{source.path}: '{key}' has shape {tuple(value.shape)}, but '{targets[key]}' of "
                f"{type(model).__name__} has {tuple(tensor.shape)}; the folder belongs to a model of "
                "another size"
            )
        with torch.no_grad():
            tensor.copy_(value)
    return set(targets.values())


def _renamings(model: nn.Module) -> list[Any]:
    if not is_transformers_model(model):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    return [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]  # type: ignore[arg-type]


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is cut short or damaged: {error}") from error
