"""find_gatherings(): in front of which modules of a block the parts of a sequence are put together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.sharding.sequence import Gathering
from fold3d.sharding.split import BlockSplit, GroupSplit, Path
from fold3d.splitting.probing.capture import SAMPLES, CapturedCall
from fold3d.splitting.probing.probe import Poison, Probe
from fold3d.tensor_parallel.slices import paths_of, replace_argument

_MOST = 8
"""Combinations that are worth a proof."""


def find_gatherings(call: CapturedCall, split: BlockSplit, hidden: Path) -> list[tuple[Gathering, ...]]:
    """Returns ways to give the regions of a block the whole sequence, the likeliest first; all are to be proved.

    A region's code wants all of the sequence from where it takes its shape, which is no later than in the module that
    holds all of the region's entries, and may be earlier. So for each region the modules that hold its entries are
    tried, the largest first: what they take of the hidden state (NaN in it, or in what is summed over the ranks, shows
    it) is gathered, unless it leaves them around their matrix products, as a residual does, which stays a part.

    Args:
        hidden: place of the hidden state in the block's arguments.
    """
    probe = Probe(call)
    taken = _taken(probe, split, hidden)
    choices = [list(_of_group(probe, group, taken)) for group in split.groups]
    for own in choices:
        own.sort(key=lambda one: one[0].module.count("."))
    combined = (tuple(dict.fromkeys(itertools.chain(*chosen))) for chosen in itertools.product(*choices))
    return list(dict.fromkeys(itertools.islice(combined, _MOST)))


def _of_group(probe: Probe, group: GroupSplit, taken: dict[str, dict[Path, bool]]) -> Iterator[tuple[Gathering, ...]]:
    """Yields what a module that holds all of a region's entries would gather."""
    holders = [entry.split(".") for entry in group.entries]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*holders, strict=False))
    common = [parts[0] for parts in shared]
    for depth in range(1, len(common) + 1):
        name = ".".join(common[:depth])
        if not name:
            continue
        # What a region takes around its matrix products, such as how much each expert counts, is part of the region.
        whole = name in group.exits
        inside = [path for path in taken.get(name, {}) if whole or _stays_inside(probe, name, path)]
        if inside:
            yield tuple(Gathering(module=name, path=path, sums=True, folded=taken[name][path]) for path in inside)


def _taken(probe: Probe, split: BlockSplit, hidden: Path) -> dict[str, dict[Path, bool]]:
    """Returns which arguments of the block's modules depend on the hidden state, and of each whether samples and their
    sequences lie in one dimension of it."""
    exits = {exit_ for group in split.groups for exit_ in group.exits}
    summed = (weight for weight, site in probe.sites.items() if site.holder in exits)
    parts = frozenset(itertools.chain(summed, (weight for weight in probe.sites if weight not in split.shards)))
    state = next(leaf for path, leaf in paths_of((probe.args, probe.kwargs)) if path[1:] == hidden)
    clean = _arguments(probe, Poison(()))
    poisoned = _arguments(probe, Poison(range(state.shape[0]), argument=hidden, every=parts))
    found: dict[str, dict[Path, bool]] = {}
    for place, leaves in poisoned.items():
        for leaf, before in zip(leaves, clean.get(place, leaves), strict=False):
            if not torch.equal(leaf, before):  # NaN is not equal to itself
                folded = state.dim() > 2 and state.shape[0] == SAMPLES and leaf.shape[:2] != state.shape[:2]
                found.setdefault(place[0], {})[place[1]] = folded
    return found


def _arguments(probe: Probe, poison: Poison) -> dict[tuple[str, Path], list[Tensor]]:
    """Returns what the block's modules were given in each of their calls, by module and place."""
    given: dict[tuple[str, Path], list[Tensor]] = {}
    undo: list[Callable[[], None]] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for path, leaf in paths_of((args, kwargs)):
                given.setdefault((name, path[1:]), []).append(leaf.clone())

        return hook

    try:
        for name, module in probe.block.named_modules():
            undo.append(module.register_forward_pre_hook(watch(name), with_kwargs=True).remove)
        probe.respond(poison)
    finally:
        for remove in undo:
            remove()
    return given


def _stays_inside(probe: Probe, name: str, path: Path) -> bool:
    """Whether an argument of a module reaches matrix products, and nothing that the module returns around them."""
    module = probe.block.get_submodule(name)
    leaked: list[bool] = []

    def poison(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return replace_argument(args, kwargs, path, lambda x: torch.full_like(x, float("nan")))

    def look(_: nn.Module, args: Any, output: Any) -> None:
        leaves = [leaf for _, leaf in paths_of(output) if leaf.is_floating_point()]
        leaked.append(any(bool(torch.isnan(leaf).any()) for leaf in leaves))

    hooks = [module.register_forward_pre_hook(poison, with_kwargs=True), module.register_forward_hook(look)]
    try:
        response = probe.respond(Poison(()))
    finally:
        for hook in hooks:
            hook.remove()
    return bool(response.sinks) and not any(leaked)
