"""Rows of the table that says how a model is spread over a tensor-parallel group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.split import BlockSplit
from fold3d.splitting.overrides import word_of


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
