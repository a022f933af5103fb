"""check_whole(): what of a block every rank may hold whole without being told."""

from __future__ import annotations

from torch import nn

from fold3d.errors import ConfigError
from fold3d.sharding.split import BlockSplit

SMALL = 8
"""A block's weights that are held whole may be one part in so many of its parameters."""


def check_whole(name: str, block: nn.Module, split: BlockSplit, tp: int) -> None:
    """Raises: ConfigError when more than a small part of a block would be whole on every rank and nobody said so."""
    sizes = {parameter: p.numel() for parameter, p in block.named_parameters()}
    total = sum(sizes.values())
    found: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for parameter, size in sizes.items():
        shard = split.shards.get(parameter)
        if block.get_parameter(parameter).dim() < 2 or (shard is not None and not shard.is_replicated):
            continue
        module = parameter if parameter in split.reasons else parameter.rpartition(".")[0]
        reason = split.reasons.get(module, "whole: no matrix product with it was seen")
        if "tp_plan" not in reason:
            called = module or parameter  # the block itself has no name in it
            found[called] = found.get(called, 0) + size
            reasons[called] = reason
    held = sum(found.values())
    if held * SMALL <= total:
        return
    largest = max(found, key=lambda module: found[module])
    matrix = next(
        p for n, p in block.named_parameters() if p.dim() > 1 and (n == largest or n.rpartition(".")[0] == largest)
    )
    reason = reasons[largest].removeprefix("whole: ")
    raise ConfigError(
        f"tp={tp}: {name}.{largest} {tuple(matrix.shape)} cannot be divided: {reason}. With "
        f"{', '.join(found)} whole on every rank, {100 * held / total:.0f} % of the block's parameters would be, more "
        f"than one in {SMALL}. Choose a tp that divides its units, or say that it is wanted: "
        f"tp_plan={dict.fromkeys(found, 'replicate')}."
    )
