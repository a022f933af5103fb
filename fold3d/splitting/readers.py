"""Which linear layers enter a region with the same tensor: their products can be computed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fold3d.sharding.split import BlockSplit, Gathering, Path
from fold3d.splitting.capture import CapturedCall
from fold3d.splitting.probe import Poison, Probe
from fold3d.tensor_parallel.linear import is_linear
from fold3d.tensor_parallel.slices import paths_of


def with_together(call: CapturedCall, split: BlockSplit) -> BlockSplit:
    """Returns the split with `together`."""
    if not split.groups:
        return split
    entries, _ = _taken(call, split, ())
    linear = _linear_entries(call, split)
    groups = _by_tensor(entries)
    once = {name for name, tensors in entries.items() if len(tensors) == 1}
    found = [tuple(names) for names in groups if all(name in linear and name in once for name in names)]
    return replace(split, together=tuple(found))


def with_readers(call: CapturedCall, split: BlockSplit, gathers: Sequence[Gathering]) -> tuple[Gathering, ...]:
    """Returns the gatherings of a block with their `readers`."""
    entries, gathered = _taken(call, split, gathers)
    linear = _linear_entries(call, split)
    out = []
    for one, tensors in zip(gathers, gathered, strict=True):
        # What is called more often, or with something else besides, would be computed for nothing.
        readers = [
            name
            for name, taken in entries.items()
            if name in linear and one.sums and len(taken) == len(tensors) == 1 and taken[0] is tensors[0]
        ]
        out.append(replace(one, readers=tuple(readers)))
    return tuple(out)


def _linear_entries(call: CapturedCall, split: BlockSplit) -> set[str]:
    """Entries that are linear layers and nothing else: no exit of a region, and with weights of which no rank holds a
    part that another one holds, too, since the gradients of those are summed in the block."""
    found = {entry for group in split.groups for entry in group.entries}
    found -= {exit_ for group in split.groups for exit_ in group.exits}
    overlapping = {name for name, shard in split.shards.items() if shard.overlaps and not shard.summed}
    return {
        name
        for name in found
        if is_linear(call.block.get_submodule(name))
        and not overlapping & {f"{name}.{key}" for key, _ in call.block.get_submodule(name).named_parameters()}
    }


def _taken(
    call: CapturedCall, split: BlockSplit, gathers: Sequence[Gathering]
) -> tuple[dict[str, list[Tensor]], list[list[Tensor]]]:
    """Returns the tensors with which each entry was called, in the order of the first calls, and those that are
    gathered."""
    probe = Probe(call)
    entries: dict[str, list[Tensor]] = {}
    gathered: dict[int, list[Tensor]] = {}

    def note(into: dict[Any, list[Tensor]], key: Any, path: Path | None = None) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            leaves = (leaf for at, leaf in paths_of((args, kwargs)) if path is None or at[1:] == path)
            into.setdefault(key, []).extend(leaves)

        return hook

    with ExitStack() as hooks:
        for name in dict.fromkeys(entry for group in split.groups for entry in group.entries):
            module = probe.block.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(note(entries, name), with_kwargs=True))
        for number, one in enumerate(gathers):
            module, hook = probe.block.get_submodule(one.module), note(gathered, number, one.path)
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        probe.respond(Poison(()))
    return entries, [gathered.get(number, []) for number in range(len(gathers))]


def _by_tensor(entries: dict[str, list[Tensor]]) -> list[list[str]]:
    """Returns the names of what was called with the same tensor; entries of several tensors are in several lists."""
    groups: list[tuple[Tensor, list[str]]] = []
    for name, tensors in entries.items():
        for x in tensors:
            known = next((names for one, names in groups if one is x), None)
            if known is None:
                groups.append((x, [name]))
            elif name not in known:
                known.append(name)
    return [names for _, names in groups]
