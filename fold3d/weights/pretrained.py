"""PretrainedFolder: weights in a folder as `save_pretrained` writes it, read tensor by tensor or part by part.

Conversion: parameters that a folder has in other tensors than the model, such as the experts of a block one by one.
Which they are and what makes parameters of them is transformers' matter (its `WeightConverter`s); here they run one at
a time, so that no more than one parameter, and what it is made of, is in memory.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fold3d.errors import CheckpointError
from fold3d.sharding.shard import Shard
from fold3d.trace.batches import is_transformers_model
from fold3d.trace.compound import is_compound
from fold3d.trace.wrappers import whole_shape
from fold3d.weights.part_marks import state_of
from fold3d.weights.parts import Parts
from fold3d.weights.safetensors_file import DTYPES, Stored, read_header, read_part


@dataclass(slots=True)
class Conversion:
    """Tensors of a folder that together make one or several parameters."""

    name: str
    """The first of these in the model."""
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(name in the folder, transformers' pattern for it)."""

    def may_make(self, names: Iterable[str]) -> bool:
        """Whether one of the parameters `names` may come of it."""
        first, *others = self.converter.target_patterns
        if any("\\" in pattern for pattern in (first, *others)):  # told only by converting
            return True
        made = {self.name, *(self.name.replace(first, other) for other in others)}
        return not made.isdisjoint(names)

    def run(self, model: Any, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields name and whole value of each parameter.

        Args:
            read: returns a tensor of the folder.
        """
        dtype = state_of(model)[self.name].dtype
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.name, key, pattern, _Reading(read, key, dtype))
        made = converter.convert(self.name, model=model, config=model.config)
        for name in list(made):
            value = made.pop(name)
            yield name, value[0] if isinstance(value, list) else value


class _Reading:
    """Reads a tensor when it is called."""

    def __init__(self, read: Callable[[str], Tensor], key: str, dtype: Any) -> None:
        self._read, self._key, self._dtype = read, key, dtype

    def __call__(self) -> Tensor:
        return self._read(self._key).to(self._dtype)


def conversions(model: nn.Module, keys: Iterable[str]) -> list[Conversion]:
    """Returns what transformers' `from_pretrained` would convert of the tensors `keys` of a folder for this model."""
    if not is_transformers_model(model):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    entries = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    if not converters:
        return []
    renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = state_of(model), getattr(model, "base_model_prefix", None)
    found: dict[str, Conversion] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if pattern is not None and name in state:
            found.setdefault(name, Conversion(name, of_pattern[pattern])).sources.append((key, pattern))
    return list(found.values())


_PEFT = "base_model.model."
"""What PEFT puts before all names."""


class PretrainedFolder:
    """A folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names.

    Raises: CheckpointError if there is neither, or if a file is missing or damaged.
    """

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        """Args:
        stem: of the files' names.
        """
        self.path, self._single = Path(folder), f"{stem}.safetensors"
        self._index = f"{self._single}.index.json"
        self._headers: dict[str, dict[str, Stored]] = {}
        self._files = self._read_index()

    def keys(self) -> list[str]:
        """Names of all tensors in the folder."""
        return list(self._files)

    def names_in(self, model: nn.Module) -> dict[str, str]:
        """Returns {name in `model`: name in the folder} for every parameter and buffer of the model that the
        folder has.

        Follows transformers' renamings of older checkpoints and the prefix of the base model ("transformer."
        in GPT-2), which may be there or not; and leaves out what PEFT adds to names.
        """
        wanted: dict[str, list[str]] = {}
        for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
            wanted.setdefault(_without_adapters(name), []).append(name)
        renamings = _renamings(model)
        prefix = getattr(model, "base_model_prefix", "")
        found: dict[str, str] = {}
        for key in self._files:
            renamed = key
            for renaming in renamings:
                renamed = renaming.rename_source_key(renamed)[0]
            for name in (key, renamed, f"{prefix}.{renamed}", renamed.removeprefix(f"{prefix}.")):
                if name in wanted:
                    found.update(dict.fromkeys(wanted[name], key))
                    break
        return found

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the whole shape of a tensor."""
        return self._stored(key).shape

    def read(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields (key, tensor) of each of `keys`, holding one tensor at a time."""
        for key in self.in_order(keys):
            stored = self._stored(key)
            if stored.kind not in DTYPES:
                yield key, self._read_by_library(key)
                continue
            tensor = torch.empty(stored.shape, dtype=DTYPES[stored.kind])
            self._fill(key, tensor, None, 0)
            yield key, tensor

    def read_whole(self, key: str) -> Tensor:
        """Returns a tensor."""
        return next(tensor for _, tensor in self.read([key]))

    def read_into(self, key: str, target: Tensor, shard: Shard | None, rank: int) -> None:
        """Fills `target`, any dtype and device, with a rank's part of a tensor; reads no more than that part.

        Args:
            shard: None: the part is the whole tensor.
        Raises: CheckpointError when the file ends before.
        """
        stored = self._stored(key)
        with torch.no_grad():
            if stored.kind not in DTYPES:
                whole = self._read_by_library(key)
                target.copy_(whole if shard is None else shard.take(whole, rank))
                return
            dtype, straight = DTYPES[stored.kind], target.is_contiguous() and target.device.type == "cpu"
            part = target if straight and target.dtype == dtype else torch.empty(target.shape, dtype=dtype)
            self._fill(key, part, shard, rank)
            if part is not target:
                target.copy_(part)

    def in_order(self, keys: Iterable[str]) -> list[str]:
        """Returns `keys` file by file, and in each as they lie there."""
        return sorted(keys, key=lambda key: (self._files[key], self._stored(key).begin))

    def _fill(self, key: str, part: Tensor, shard: Shard | None, rank: int) -> None:
        path = self.path / self._files[key]
        descriptor = os.open(path, os.O_RDONLY)
        try:
            read_part(descriptor, self._stored(key).begin, part, shard, rank)
        except EOFError as error:
            raise CheckpointError(f"{path} is cut short or damaged: {error}") from error
        finally:
            os.close(descriptor)

    def _read_by_library(self, key: str) -> Tensor:
        """Returns a tensor of a dtype that torch's own tensors hold packed, such as those of 4 bits."""
        with safe_open(self.path / self._files[key], framework="pt", device="cpu") as handle:
            tensor: Tensor = handle.get_tensor(key)
            return tensor

    def _stored(self, key: str) -> Stored:
        file = self._files[key]
        if file not in self._headers:
            self._headers[file] = _header(self.path / file)
        if key not in self._headers[file]:
            raise CheckpointError(f"{self.path}: {self._index} says that {file} holds {key}, which it does not")
        return self._headers[file][key]

    def _read_index(self) -> dict[str, str]:
        index = self.path / self._index
        if index.is_file():
            try:
                files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
            missing = sorted({file for file in files.values() if not (self.path / file).is_file()})
            if missing:
                raise CheckpointError(f"{self.path}: {self._index} names {missing[0]}, which is not there")
            return files
        single = self.path / self._single
        if not single.is_file():
            raise CheckpointError(
                f"{self.path} has neither {self._single} nor {self._index}; pass a folder written by save_pretrained "
                "(weights in the .bin format must be saved again as safetensors)"
            )
        self._headers[self._single] = _header(single)
        return dict.fromkeys(self._headers[self._single], self._single)


def load(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, tuple[str, ...]],
    folder: str | Path,
    parts: Parts | None = None,
) -> set[str]:
    """Copies the weights in `folder` into `tensors` and returns the names that were found.

    What the folder has in other tensors than the model is converted as by `from_pretrained`, whole, one at a time.

    Args:
        tensors: real tensors of `model` to fill, by canonical name; values are converted to their dtype.
        groups: for each canonical name of a tied tensor all its names; any of them is looked for.
        parts: which part of each parameter the tensors are; None: they are whole. Nothing else is read.
    Raises: CheckpointError, before any value has changed, if no name in the folder belongs to the model, or a shape
        differs; or if a file is damaged, or what is converted has another shape.
    """
    parts = parts or Parts.whole()
    source = PretrainedFolder(folder)
    known = source.names_in(model)
    own = {alias: name for name in tensors for alias in groups.get(name, (name,))}
    targets = {name: known[alias] for alias, name in reversed(own.items()) if alias in known}
    rest = {alias: name for alias, name in own.items() if name not in targets}
    made = [one for one in conversions(model, source.keys()) if one.may_make(rest)] if rest else []
    if not known and not made:
        raise _none_of(source, model)

    def check(key: str, found: Sequence[int], name: str) -> None:
        _check_shape(source, key, found, model, name, parts.whole_shape(name, tensors[name].shape))

    for name, key in targets.items():
        check(key, source.shape(key), name)
    names = {key: name for name, key in targets.items()}
    for key in source.in_order(names):
        source.read_into(key, tensors[names[key]], parts.shard_of(names[key]), parts.rank)
    done = set(targets)
    for conversion in made:
        for alias, value in conversion.run(model, source.read_whole):
            if alias in rest:
                name = rest[alias]
                check(alias, value.shape, name)
                with torch.no_grad():
                    tensors[name].copy_(parts.take(name, value))
                done.add(name)
    return done


def check_folder(model: nn.Module, folder: str | Path) -> None:
    """Raises CheckpointError for a folder that `load` would refuse for what its files say that they hold."""
    source = PretrainedFolder(folder)
    known = source.names_in(model)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    if not known and not any(one.may_make(tensors) for one in conversions(model, source.keys())):
        raise _none_of(source, model)
    for name, key in known.items():
        if tensors[name].is_meta and not is_compound(tensors[name]):  # what has values keeps them, such as a new head
            _check_shape(source, key, source.shape(key), model, name, whole_shape(tensors[name]))


def _none_of(source: PretrainedFolder, model: nn.Module) -> CheckpointError:
    return CheckpointError(
        f"{source.path} has no weight of {type(model).__name__}: it has {', '.join(source.keys()[:4])}, ...; pass the "
        "folder of a model of this architecture"
    )


def _check_shape(
    source: PretrainedFolder, key: str, found: Sequence[int], model: nn.Module, name: str, whole: Sequence[int]
) -> None:
    if tuple(found) != tuple(whole):
        raise CheckpointError(
            f"{source.path}: '{key}' has shape {tuple(found)}, but '{name}' of {type(model).__name__} has "
            f"{tuple(whole)}; the folder belongs to a model of another size"
        )


def _without_adapters(name: str) -> str:
    """Returns what a parameter is called in the model that PEFT has wrapped."""
    if not name.startswith(_PEFT):
        return name
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.", ".", name.removeprefix(_PEFT))


def _renamings(model: Any) -> list[Any]:
    model = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
    if not is_transformers_model(model):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    return [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]


def _header(file: Path) -> dict[str, Stored]:
    try:
        return read_header(file)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file} is cut short or damaged: {error}") from error
