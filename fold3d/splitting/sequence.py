"""plan_sequence(): how the ranks that share a model's blocks share the sequence of its hidden state."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.sharding.shard import Shard, even_part
from fold3d.sharding.split import BlockSplit, Gathering, GroupSplit, InnerResult, Path, SequenceSplit
from fold3d.splitting.block_classes import differs_in_training
from fold3d.splitting.capture import SAMPLES, CapturedCall
from fold3d.splitting.inner_results import inner_results
from fold3d.splitting.probe import Poison, Probe
from fold3d.splitting.proof import Used, prove_sequence
from fold3d.splitting.readers import with_readers
from fold3d.tensor_parallel.slices import paths_of, replace_argument
from fold3d.trace.model_trace import Trace


class NoSequenceError(Exception):
    """Why the ranks cannot share the sequence."""


@dataclass(frozen=True, slots=True)
class Link:
    """A block's place among those that hand parts to each other."""

    hidden: Path
    result: Path
    begins: bool
    ends: bool


def find_chains(calls: Mapping[str, CapturedCall], trace: Trace) -> dict[str, Link]:
    """Returns each block's place. Raises: NoSequenceError when a block hands its hidden state to no other as it is,
    or runs several times."""
    for leak in trace.leaks:
        raise NoSequenceError(leak)
    for name, times in Counter(trace.blocks).items():
        if times > 1:  # it may be handed the whole in one run and a part in another
            raise NoSequenceError(f"{name} runs several times")
    blocks = list(calls)
    hidden: dict[str, Path] = {}
    results: dict[str, Path] = {}
    for number, (before, name) in enumerate(pairwise(blocks)):
        handed = [(path, result) for path, (block, result) in calls[name].handed.items() if block == before]
        if not handed:
            continue
        # What comes first in its result is what a block is for; others ride along.
        path, result = min(handed, key=lambda pair: [str(key) for key in pair[1]])
        if trace.modified[number]:
            raise NoSequenceError(f"what {before} returns is written to in place")
        hidden[name], results[before] = path, result
    links: dict[str, Link] = {}
    for number, name in enumerate(blocks):
        after = blocks[number + 1] if number + 1 < len(blocks) else ""
        begins, ends = name not in hidden, name not in results
        if begins and ends:
            raise NoSequenceError(f"no other block takes what {name} returns, as it is")
        path = hidden[after] if begins else hidden[name]
        if begins and not any(at[1:] == path for at, _ in paths_of((calls[name].args, calls[name].kwargs))):
            raise NoSequenceError(f"{name} is called in another way than {after}")
        result = results[blocks[number - 1]] if ends else results[name]
        links[name] = Link(path, result, begins, ends)
    return links


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

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for path, leaf in paths_of((args, kwargs)):
                given.setdefault((name, path[1:]), []).append(leaf.clone())

        return hook

    with ExitStack() as hooks:
        for name, module in probe.block.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(watch(name), with_kwargs=True))
        probe.respond(poison)
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

    with module.register_forward_pre_hook(poison, with_kwargs=True), module.register_forward_hook(look):
        response = probe.respond(Poison(()))
    return bool(response.sinks) and not any(leaked)


LENGTH = 7
"""Of the sequences that blocks are proved on, at most; one that leaves a rest where it can be chosen."""


def odd_length(tp: int) -> int:
    """Returns the length of texts to prove on: parts of different lengths are the harder case."""
    for length in range(LENGTH, 1, -1):
        longest, shortest = (end - first for first, end in (even_part(length, tp, 0), even_part(length, tp, tp - 1)))
        if longest > shortest:
            return length
    return LENGTH


@dataclass(frozen=True, slots=True)
class SharedSequence:
    """What `plan_sequence` found."""

    blocks: Mapping[str, SequenceSplit]
    shards: Mapping[str, Shard]
    """Of parameters that work on parts of the sequence, whose gradients are summed."""


@dataclass(frozen=True, slots=True)
class _FoundSplit:
    dim: int
    gathers: tuple[Gathering, ...]
    summed: frozenset[str]
    inner: tuple[InnerResult, ...]
    operators: tuple[int, ...]


def plan_sequence(
    calls: Mapping[str, CapturedCall],
    trace: Trace,
    splits: Mapping[str, BlockSplit],
    tp: int,
    tied: set[str],
    class_of: Callable[[str, CapturedCall], Any],
) -> SharedSequence:
    """Returns how every block works on parts of the sequence, proved on emulated ranks for one block of each class.

    Args:
        splits: how blocks are divided, by name.
        tied: parameters that are read elsewhere, too.
        class_of: what says which blocks are alike.
    Raises: NoSequenceError when it is not possible for all blocks.
    """
    links = find_chains(calls, trace)
    known: dict[Any, _FoundSplit] = {}
    blocks: dict[str, SequenceSplit] = {}
    shards: dict[str, Shard] = {}
    for name, call in calls.items():
        link, split = links[name], splits[name]
        key = class_of(name, call), link.hidden, link.result
        if key not in known:
            known[key] = _of_class(name, call, split, link.hidden, link.result, tp)
        found = known[key]
        blocks[name] = SequenceSplit(
            hidden=link.hidden, result=link.result, dim=found.dim, gathers=found.gathers, begins=link.begins,
            ends=link.ends, inner=found.inner, operators=found.operators,
        )  # fmt: skip
        for parameter in sorted(found.summed):
            full = f"{name}.{parameter}"
            if full in tied:
                raise NoSequenceError(f"{full} is read elsewhere, too")
            shape = call.block.get_parameter(parameter).shape
            shards[full] = Shard.replicated(shape, tp, summed=True)
    return SharedSequence(blocks, shards)


def _of_class(name: str, call: CapturedCall, split: BlockSplit, hidden: Path, result: Path, tp: int) -> _FoundSplit:
    if not split.groups:
        raise NoSequenceError(f"{name} is whole on every rank")
    shape = call.shape_at(hidden)
    if shape is None or len(shape) not in (2, 3):
        raise NoSequenceError(f"the hidden state that {name} takes is {None if shape is None else tuple(shape)}")
    reason = f"no module of {name} takes the whole sequence of a region"
    ways = (False, True) if differs_in_training(call) else (False,)
    for gathers in find_gatherings(call, split, hidden):
        for dim, sums in _ways(shape):
            tried = tuple(replace(one, sums=sums) for one in gathers)
            sequence = SequenceSplit(hidden=hidden, result=result, dim=dim, gathers=tried)
            summed: set[str] = set()
            used = Used()
            for training in ways:
                wrong, found = prove_sequence(call, split, tp, sequence, training, used)
                summed |= found
                if wrong:
                    break
            else:
                inner = inner_results(call, split, tp, sequence)
                operators = tuple(sorted(used.operators))
                return _FoundSplit(dim, with_readers(call, split, tried), frozenset(summed), inner, operators)
            reason = f"parts of it do not make up {name} ({wrong})"
    raise NoSequenceError(reason)


def _ways(shape: torch.Size) -> Iterator[tuple[int, bool]]:
    """Yields where the sequence lies, behind the samples or in front of them, and how gradients may return."""
    dim = 1 if len(shape) > 2 and shape[0] == SAMPLES else 0
    yield from ((dim, True), (dim, False))
