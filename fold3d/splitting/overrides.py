"""Overrides: what a user says about single modules, in the words of transformers' tensor-parallel plans."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fold3d.errors import ConfigError
from fold3d.sharding.split import BlockSplit
from fold3d.sharding.vocabulary import Vocabulary
from fold3d.tensor_parallel.linear import is_linear, is_transposed


def word_of(block: nn.Module, path: str, split: BlockSplit) -> str:
    """Returns "colwise", "rowwise" or "replicate" of a module or a parameter of a block, by relative name."""
    names = [name for name, _ in block.named_parameters() if name == path or name.rpartition(".")[0] == path]
    entries = {entry for group in split.groups for entry in group.entries}
    exits = {exit_ for group in split.groups for exit_ in group.exits}
    for name in names:
        shard = split.shards.get(name)
        if shard is None or shard.is_replicated:
            continue
        holder = name.rpartition(".")[0]
        if holder in entries and holder in exits:
            parameter = block.get_parameter(name)
            return "colwise" if parameter.dim() < 3 or _feeds(name, split) else "rowwise"
        module = block.get_submodule(holder)
        if is_linear(module) and name.endswith("weight"):
            return "colwise" if shard.dim == int(is_transposed(module)) else "rowwise"
        return "colwise" if holder in entries else "rowwise"
    return "replicate"


def _feeds(name: str, split: BlockSplit) -> bool:
    return "summed in" in split.reasons.get(name, "")


WORDS = ("colwise", "rowwise", "replicate")


class Overrides:
    """Patterns of module names -> "colwise", "rowwise" or "replicate".

    A pattern is the name of a module, or of a parameter that is no linear module's, with `*` for anything, in the model
    or in each block: `model.layers.*.mlp.up_proj`, `mlp.*`.

    Raises: ConfigError for another word.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        for pattern, word in patterns.items():
            if word not in WORDS:
                raise ConfigError(f"tp_plan[{pattern!r}] is {word!r}; it must be one of {', '.join(WORDS)}")
        self._patterns = dict(patterns)

    def check_names(self, model: nn.Module) -> None:
        """Raises: ConfigError for a pattern that matches nothing of the model, or nothing that could be divided so."""
        weights = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        held = {name.rpartition(".")[0] for name in weights}
        names = [name for name in (*(name for name, _ in model.named_modules()), *weights) if name]
        for pattern, word in self._patterns.items():
            if not any(_matches(pattern, name) for name in names):
                raise ConfigError(
                    f"tp_plan[{pattern!r}] matches no module and no parameter of {type(model).__name__}; its modules "
                    f"are called {', '.join(names[-6:-3])} and so on"
                )
            if word != "replicate" and not any(_matches(pattern, name) for name in (*held, *weights)):
                inside = [name for name in weights if any(_matches(pattern, part) for part in _around(name))]
                such = f"; name its layers, such as {inside[0].rpartition('.')[0]}" if inside else ""
                raise ConfigError(
                    f"tp_plan[{pattern!r}] is {word!r}, but what it matches holds no weights itself{such}"
                )

    def of_block(self, name: str, block: nn.Module) -> dict[str, str]:
        """Returns the modules and parameters of a block, by relative name, that a pattern is about, with its word; the
        block itself is ""."""
        inside = [path for path, _ in (*block.named_modules(), *block.named_parameters())]
        found: dict[str, str] = {}
        for path in inside:
            for pattern, word in self._patterns.items():
                if _matches(pattern, f"{name}.{path}" if path else name):
                    found[path] = word
        return found

    def replicated(self, name: str, block: nn.Module) -> frozenset[str]:
        """Returns what of a block is to be whole, and all that lies in it."""
        said = [path for path, word in self.of_block(name, block).items() if word == "replicate"]
        said += [holder for path in said if is_linear(block.get_submodule(holder := _holder(block, path)))]
        inside = [path for path, _ in (*block.named_modules(), *block.named_parameters()) if path]
        return frozenset(path for path in inside for one in said if one in ("", path) or path.startswith(f"{one}."))

    def check_split(self, name: str, block: nn.Module, split: BlockSplit) -> None:
        """Raises: ConfigError when a module that is to be divided in one way is not."""
        for path, word in self.of_block(name, block).items():
            if word == "replicate" or not _holds_weight(block, path):
                continue
            found = word_of(block, path, split)
            if found != word:
                raise ConfigError(
                    f"tp_plan says {word!r} of {name}.{path}, but it is {found}: "
                    f"{split.reasons.get(path, 'no matrix product reads it')}. Leave it out of tp_plan, or say "
                    '"replicate".'
                )

    def without_replicated(self, model: nn.Module, vocabulary: Vocabulary) -> Vocabulary:
        """Returns what of the vocabulary's split is left. Raises: ConfigError for another word about its modules."""
        modules = (*vocabulary.embeddings, *vocabulary.heads)
        said = {name: word for name in modules for one, word in self._patterns.items() if _is_about(one, name)}
        for name, word in said.items():
            found = "rowwise" if name in vocabulary.embeddings else "colwise"
            if word not in ("replicate", found):
                raise ConfigError(f'tp_plan says {word!r} of {name}; it is {found}. Leave it out, or say "replicate".')
        replicated = [name for name, word in said.items() if word == "replicate"]
        return vocabulary.without(model, dict.fromkeys(replicated, 'whole: tp_plan says "replicate"'))

    def differences(self, model: nn.Module, blocks: Mapping[str, BlockSplit]) -> Iterator[str]:
        """Yields where the plan differs from the model's own, which transformers keeps for some: for information."""
        own: Mapping[str, Any] = getattr(model, "_tp_plan", None) or {}
        seen: set[str] = set()
        for name, split in blocks.items():
            block = model.get_submodule(name)
            for path, module in block.named_modules():
                if not path or not any(True for _ in module.named_parameters(recurse=False)):
                    continue
                general = re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{path}")
                theirs = own.get(general)
                if theirs not in ("colwise", "rowwise") or general in seen:
                    continue
                found = word_of(block, path, split)
                if found != theirs:
                    seen.add(general)
                    yield f"{general} is {theirs} in the model's own tp_plan, here it is {found}"


def _holds_weight(block: nn.Module, path: str) -> bool:
    try:
        module = block.get_submodule(path)
    except AttributeError:
        return True  # a parameter
    return any(True for _ in module.named_parameters(recurse=False))


def _holder(block: nn.Module, path: str) -> str:
    """Returns the module that holds a parameter; of a module, itself."""
    return path.rpartition(".")[0] if path in dict(block.named_parameters()) else path


def _around(name: str) -> list[str]:
    """Returns the names of the modules that a parameter lies in."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _is_about(pattern: str, module: str) -> bool:
    return _matches(pattern, module) or _matches(pattern, f"{module}.weight")


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
