"""inside_of(): what layers cost where modules inside of blocks compute again what their backward needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fold3d.placement.recomputed_blocks import modules_inside
from fold3d.plan.costs import Inside
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.recompute import Choice, Recompute
from fold3d.trace import Trace


def inside_of(
    model: nn.Module,
    trace: Trace,
    micro_batch: Mapping[str, Any],
    recompute: Recompute,
    forward: Sequence[float],
    device: torch.device | str = "cpu",
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[Inside, ...]:
    """Returns an entry for each set of patterns in `recompute`. Bytes are counted; of a block's time modules take the
    share that their weights are of all its weights: matrix products are nearly all of the work.

    Args:
        forward: seconds per layer.
        model, trace, micro_batch, device, autocast, prepare: as `layer_bytes`.
    """
    found = []
    for choice in dict.fromkeys(choice for choice in recompute.choices if choice.patterns):
        shares = [0.0, *(_share(model.get_submodule(block), choice) for block in trace.blocks), 0.0]

        def both(copied: nn.Module, choice: Choice = choice) -> None:
            prepare(copied)
            _checkpoint(copied, blocks=trace.modules, choice=choice)

        layers = layer_bytes(model, trace, micro_batch, device, autocast=autocast, prepare=both)
        seconds = tuple(share * time for share, time in zip(shares, forward, strict=True))
        found.append(Inside(patterns=choice.patterns, layers=layers, seconds=seconds))
    return tuple(found)


def _share(block: nn.Module, choice: Choice) -> float:
    size = sum(parameter.numel() for parameter in block.parameters())
    return sum(p.numel() for module in modules_of(block, choice) for p in module.parameters()) / size if size else 0.0


def _checkpoint(model: nn.Module, *, blocks: Sequence[str], choice: Choice) -> None:
    for block in map(model.get_submodule, blocks):
        for module in modules_of(block, choice):
            compute_again(module)


def modules_of(block: nn.Module, choice: Choice) -> list[nn.Module]:
    """Returns the modules inside of a block that compute again."""
    return [block.get_submodule(name) for name in choice.modules(modules_inside(block))]


def compute_again(module: nn.Module) -> None:
    """Has a module of a copy without values compute again, in a backward, what that needs."""
    again: Any = functools.partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
    module.forward = again
