"""How a module is divided, in one word."""

from __future__ import annotations

from torch import nn

from fold3d.sharding.split import BlockSplit
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
