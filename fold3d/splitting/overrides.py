"""Overrides: what a user says about single modules, in the words of transformers' tensor-parallel plans; table(): what
is said to the user of a split, in these words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fold3d.errors import ConfigError
from fold3d.sharding.plan import ShardingPlan
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


@dataclass(frozen=True, slots=True)
class Row:
    """A module, or a parameter that is no linear module's, of one block or of all of its class."""

    name: str
    split: str
    """"column", "row", "whole", or "vocabulary"."""
    reason: str
    whole: int
    """Bytes of its parameters, in all blocks of the row together."""
    rank: int
    """Bytes of them on the rank that has most."""


_WORDS = {"colwise": "column", "rowwise": "row", "replicate": "whole"}


def table(model: nn.Module, plan: ShardingPlan) -> list[Row]:
    """Returns the rows of all modules with parameters: those of blocks that are divided alike once, then others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    together: dict[tuple[str, int], list[str]] = {}
    for block, split in plan.blocks.items():
        together.setdefault((re.sub(r"\d+$", "*", block), id(split)), []).append(block)
    rows = [row for (_, _), blocks in together.items() for row in _rows_of(model, plan, blocks, names)]
    inside = {name for block in plan.blocks for name, _ in model.get_submodule(block).named_parameters(prefix=block)}
    seen: set[str] = set()
    for holder, module in model.named_modules():
        own = [names[id(p)] for p in module.parameters(recurse=False)]
        own = [name for name in own if name not in inside and name not in seen]
        if not own:
            continue
        seen.update(own)
        spread = holder in plan.vocabulary.embeddings or holder in plan.vocabulary.heads
        reason = plan.vocabulary.reasons.get(holder, "outside of the blocks")
        rows.append(Row(holder, "vocabulary" if spread else "whole", reason, *_bytes(model, plan, own)))
    return rows


def _rows_of(model: nn.Module, plan: ShardingPlan, blocks: list[str], names: dict[int, str]) -> Iterator[Row]:
    first, split = blocks[0], plan.blocks[blocks[0]]
    numbers = [int(found.group()) for block in blocks if (found := re.search(r"\d+$", block))]
    prefix = first
    if len(blocks) > 1 and len(numbers) == len(blocks):
        last = f"{numbers[0]}..{numbers[-1]}"
        if numbers != list(range(numbers[0], numbers[-1] + 1)):
            last = ",".join(map(str, numbers))
        prefix = re.sub(r"\d+$", last, first)
    block = model.get_submodule(first)
    for path, own in _entries(block, split):
        parameters = [names[id(model.get_parameter(f"{one}.{name}"))] for one in blocks for name in own]
        word = _WORDS[word_of(block, path, split)]
        reason = split.reasons.get(path, "no matrix").removeprefix("whole: ").removeprefix("whole, ")
        yield Row(f"{prefix}.{path}", word, reason, *_bytes(model, plan, parameters))


def _entries(block: nn.Module, split: BlockSplit) -> Iterator[tuple[str, list[str]]]:
    """Yields what rows are about, relative to a block, with the parameters."""
    for holder, module in block.named_modules():
        own = [f"{holder}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)]
        single = [name for name in own if name in split.reasons]
        for name in single:
            yield name, [name]
        rest = [name for name in own if name not in single]
        if rest and (single or holder == ""):
            for name in rest:
                yield name, [name]
        elif rest:
            yield holder, rest


def _bytes(model: nn.Module, plan: ShardingPlan, parameters: list[str]) -> tuple[int, int]:
    whole = 0
    ranks = [0] * plan.tp
    for name in parameters:
        parameter = model.get_parameter(name)
        size = parameter.numel() * parameter.element_size()
        whole += size
        shard = plan.shard_of(name)
        for rank in range(plan.tp):
            ranks[rank] += size if shard is None else size * shard.length(rank) // shard.size
    return whole, max(ranks)
