"""plan_sharding(): how a model is spread over a tensor-parallel group."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from fold3d.errors import ConfigError, Fold3dError, TraceError
from fold3d.sharding.plan import ShardingPlan
from fold3d.sharding.shard import Shard
from fold3d.sharding.split import BlockSplit, SequenceSplit
from fold3d.sharding.vocabulary import VocabularyReads, find_vocabulary, watch_reads
from fold3d.splitting.block_classes import BlockClasses, differs_in_training
from fold3d.splitting.capture import CapturedCall, capture, skeleton_of
from fold3d.splitting.draws import with_draws
from fold3d.splitting.infer import infer
from fold3d.splitting.inner_results import with_inner
from fold3d.splitting.overrides import Overrides
from fold3d.splitting.probe import Atom
from fold3d.splitting.proof import Used, prove
from fold3d.splitting.prove_vocabulary import prove_vocabulary
from fold3d.splitting.readers import with_together
from fold3d.splitting.sequence import NoSequenceError, odd_length, plan_sequence
from fold3d.trace.caches import apart_from_caches
from fold3d.trace.model_trace import Trace
from fold3d.trace.shadow import shared

_MOST = 16


def remembered(
    decided_by: tuple[nn.Module, Trace, Mapping[str, Any], int, Mapping[str, str] | None, bool],
    make: Callable[[], ShardingPlan],
) -> ShardingPlan:
    """Returns the plan made before from the like of `decided_by`, or what `make` returns."""
    key = _key(*decided_by)
    plans = _plans()
    if key not in plans:
        plan = make()
        while len(plans) >= _MOST:
            del plans[next(iter(plans))]
        plans[key] = plan
    return plans[key]


@cache
def _plans() -> dict[str, ShardingPlan]:
    return {}


def _key(
    model: nn.Module,
    trace: Trace,
    example: Mapping[str, Any],
    tp: int,
    overrides: Mapping[str, str] | None,
    sequence_parallel: bool,
) -> str:
    """Returns a hash of the model's modules with their shapes and numbers, its configuration and how it is called."""
    text = hashlib.blake2b(digest_size=16)

    def add(*parts: Any) -> None:
        text.update(repr(parts).encode())

    for name, module in model.named_modules():
        add(name, type(module).__module__, type(module).__qualname__)
        add([(key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters(recurse=False)])
        # A configuration's to_dict does not say how attention is computed.
        add(_plain(module), _plain(getattr(module, "config", None)))
    config: Any = getattr(model, "config", None)
    add(str(config.to_dict()) if hasattr(config, "to_dict") else "")
    leaves, spec = tree_flatten(dict(example))
    add(str(spec), [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves])
    add(trace.blocks, trace.form, trace.tied, trace.direct, trace.leaks, trace.modified)
    add(tp, sorted((overrides or {}).items()), sequence_parallel)
    return text.hexdigest()


_PLAIN = (int, bool, float, str, type(None), torch.dtype)


def _plain(value: Any) -> list[tuple[str, str]]:
    """Returns the attributes of an object that are numbers, texts, containers of these, and functions, in words."""
    found = getattr(value, "__dict__", {})
    return sorted((key, text) for key, one in found.items() if (text := _text(one)))


def _text(value: Any, under_way: tuple[int, ...] = ()) -> str:
    """Returns in words what `_plain` looks at; "" for others. A callable that words do not tell from others has a
    number of its own."""
    if id(value) in under_way:
        return ""
    inside = partial(_text, under_way=(*under_way, id(value)))
    if isinstance(value, CodeType):
        return repr((value.co_code, value.co_names, *map(inside, value.co_consts)))
    if isinstance(value, FunctionType):
        around = list[Any]()
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                around.append(cell.cell_contents)
        given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return repr([inside(one) or f"{type(one)} {id(one)}" for one in (value.__code__, *around, *given)])
    if callable(value) and not isinstance(value, (nn.Module, type)):
        return f"{type(value)} {id(value)}"
    return repr(value) if all(type(leaf) in _PLAIN for leaf in tree_leaves(value)) else ""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What does not depend on the number of ranks."""

    of: nn.Module
    by: Trace
    skeleton: nn.Module
    calls: dict[str, CapturedCall]
    reach: dict[str, dict[str, list[Atom]]]
    """By block, as far as it is known: what channels of its products reach."""
    reads: VocabularyReads


def _seen(model: nn.Module, trace: Trace, example: Mapping[str, Any]) -> _Seen:
    known = shared(_Seen)
    for one in known:
        if one.of is model and one.by is trace:
            return one
    skeleton = skeleton_of(model, trace)
    calls = capture(model, trace, example, shadow=skeleton)
    known.append(_Seen(model, trace, skeleton, calls, {}, watch_reads(model, trace, example)))
    return known[-1]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Blocks are run on a few tokens: several threads of torch would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _idle(block: nn.Module, split: BlockSplit) -> set[str]:
    """Returns modules with parameters that do not run, such as a decoder's cross-attention without an encoder: nobody
    can tell how to divide them, and a call that runs them is an error. Not those of a list of which others run, such
    as experts: they will."""

    def may_run(path: str) -> bool:
        names = path.split(".")
        lists = (".".join(names[:end]) for end in range(len(names)))
        held = (one for one in lists if isinstance(block.get_submodule(one), (nn.ModuleList, nn.ModuleDict)))
        return any(other not in split.unrun for one in held for other in run_below(one))

    def run_below(path: str) -> set[str]:
        holders = (name.rpartition(".")[0] for name, _ in block.named_parameters())
        return {one for one in holders if one.startswith(f"{path}.")}

    return {path for path in split.unrun if not may_run(path)}


SMALL = 8
"""A block's weights that are held whole may be one part in so many of its parameters."""


def check_whole(name: str, block: nn.Module, split: BlockSplit, tp: int) -> None:
    """Raises: ConfigError when more than a small part of a block would be whole on every rank and nobody said so."""
    sizes = {parameter: p.numel() for parameter, p in block.named_parameters()}
    total = sum(sizes.values())
    idle = _idle(block, split)
    found: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for parameter, size in sizes.items():
        shard = split.shards.get(parameter)
        if block.get_parameter(parameter).dim() < 2 or (shard is not None and not shard.is_replicated):
            continue
        if parameter.rpartition(".")[0] in idle:
            continue
        module = parameter if parameter in split.reasons else parameter.rpartition(".")[0]
        reason = split.reasons.get(module, "whole: no matrix product with it was seen")
        if "tp_plan says" not in reason:
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


def plan_sharding(
    model: nn.Module,
    trace: Trace,
    example: Mapping[str, Any],
    tp: int,
    overrides: Mapping[str, str] | None = None,
    *,
    sequence_parallel: bool = False,
) -> ShardingPlan:
    """Returns how `model` is spread over `tp` ranks; the same on every process, whatever the weights are.

    One block of each class (`BlockClasses`) is run to find out how it may be divided (`infer`), and what was found is
    proved (`prove`). The model is not touched and may be on the meta
    device. Plans are remembered in the process, by what decides them.

    Args:
        trace: the model's recording.
        example: keyword arguments of the model's forward, as recorded.
        sequence_parallel: whether the ranks share the sequence outside of regions, too, where that is possible.
        overrides: module names, with `*` for any part of one, -> "colwise", "rowwise" or "replicate".
    Raises: ConfigError when something large cannot be divided, or an override cannot be followed; TraceError when the
        blocks cannot be run.
    """
    if tp < 1:
        raise ConfigError(f"tp must be at least 1, got {tp}")
    if tp == 1:
        return ShardingPlan(tp=1)

    def plan() -> ShardingPlan:
        with apart_from_caches(model), _one_thread():
            return _plan(model, trace, example, tp, Overrides(overrides or {}), sequence_parallel)

    return remembered((model, trace, example, tp, overrides, sequence_parallel), plan)


def _plan(
    model: nn.Module,
    trace: Trace,
    example: Mapping[str, Any],
    tp: int,
    overrides: Overrides,
    sequence_parallel: bool,
) -> ShardingPlan:
    overrides.check_names(model)
    seen = _seen(model, trace, example)
    skeleton, calls = seen.skeleton, seen.calls
    tied = {name for group in trace.tied for name in group} | set(trace.direct) | set(trace.shared)
    classes, kinds = BlockClasses(overrides), dict[str, Hashable]()
    of_kind: dict[Hashable, BlockSplit] = {}
    blocks: dict[str, BlockSplit] = {}
    shards: dict[str, Shard] = {}
    for name, call in calls.items():
        try:
            kind = kinds[name] = classes.of(name, call)
            if kind not in of_kind:
                split = with_draws(call, _split(name, call, tp, overrides, tied, seen.reach.setdefault(name, {})), tp)
                of_kind[kind] = with_inner(call, with_together(call, split), tp)
        except Fold3dError:
            raise
        except Exception as error:
            raise TraceError(
                f"tp={tp}: {name} ({type(call.block).__name__}) could not be run by itself to find out how it may be "
                f"divided: {type(error).__name__}: {error}. Set tp=1, or other blocks with the setting `blocks`."
            ) from error
        split = of_kind[kind]
        blocks[name] = split
        shards.update({f"{name}.{parameter}": shard for parameter, shard in split.shards.items()})
    vocabulary = overrides.without_replicated(model, find_vocabulary(model, trace, tp, example, seen.reads))
    vocabulary = prove_vocabulary(model, vocabulary, tp)
    shards.update(vocabulary.shards)
    notes = tuple(overrides.differences(model, blocks))
    sequence: Mapping[str, SequenceSplit] = {}
    reason = ""
    if sequence_parallel:
        try:
            odd = capture(model, trace, example, odd_length(tp), skeleton)
            kind_of = lambda name, call: (kinds[name], classes.made_of(name, call))  # noqa: E731
            found = plan_sequence(odd, trace, blocks, tp, tied, kind_of)
            sequence = found.blocks
            shards.update(found.shards)
        except NoSequenceError as error:
            reason = str(error)
        except Exception as error:  # whatever a block's code does when it is given something else: nobody depends on it
            reason = f"a block could not be tried on a part of it ({type(error).__name__}: {error})"
    return ShardingPlan(
        tp=tp, shards=shards, blocks=blocks, notes=notes, vocabulary=vocabulary, sequence=sequence,
        sequence_reason=reason,
    )  # fmt: skip


def _split(
    name: str, call: CapturedCall, tp: int, overrides: Overrides, tied: set[str], reach: dict[str, list[Atom]]
) -> BlockSplit:
    """Returns a block's proved split. Raises: ConfigError."""
    whole = overrides.replicated(name, call.block) | _holders(name, call.block, tied)
    used = Used()
    split, failed = _proved(call, tp, whole, used, reach)
    reasons = {**split.reasons, **failed}
    for path in _holders(name, call.block, tied) & reasons.keys():
        reasons[path] = "whole: another module holds its weight, too"
    named = [path for path, _ in call.block.named_modules()]
    named += [path for path, _ in call.block.named_parameters(recurse=False)]  # which have no module to be named by
    replicated = overrides.replicated(name, call.block)
    for path in (*named, *reasons):  # in one order in all processes
        if path in replicated:
            reasons[path] = 'whole: tp_plan says "replicate"'
    made = used.put_into(replace(split, reasons=reasons), call.block)
    overrides.check_split(name, call.block, made)
    check_whole(name, call.block, made, tp)
    return made


def _proved(
    call: CapturedCall, tp: int, whole: frozenset[str], used: Used, reach: dict[str, list[Atom]]
) -> tuple[BlockSplit, dict[str, str]]:
    """Returns a split that is proved, and why regions that would be wrong are left whole, by module."""
    ways = (False, True) if differs_in_training(call) else (False,)

    def wrong_in(split: BlockSplit) -> str:
        used.operators.clear()
        return next((wrong for training in ways if (wrong := prove(call, split, tp, training, used))), "")

    split = infer(call, tp, whole, reach)
    wrong = wrong_in(split)
    if not wrong:
        return split, {}
    failed: dict[str, str] = {}
    exits = [exit_ for group in split.groups for exit_ in group.exits]
    kept = set(exits)

    def only(chosen: Collection[str]) -> BlockSplit:
        """Returns a split in which of the regions found those with these exits alone are divided."""
        return infer(call, tp, whole | _held_by(call.block, set(exits) - set(chosen)), reach)

    for exit_ in exits:
        alone = only([exit_])
        wrong = wrong_in(alone)
        if wrong:
            kept.discard(exit_)
            failed.update(dict.fromkeys(_divided(alone), f"whole: divided, {wrong}"))
    split = only(kept)
    wrong = wrong_in(split)
    if wrong:
        failed.update(dict.fromkeys(_divided(split), f"whole: divided, {wrong}"))
        split = only([])
        if split.groups and wrong_in(split):  # other regions, in the place of those
            split = infer(call, tp, _held_by(call.block, dict(call.block.named_modules())), reach)
    return split, failed


def _held_by(block: nn.Module, modules: Collection[str]) -> frozenset[str]:
    """Returns these modules of a block and the parameters that they hold themselves: experts are known by theirs."""
    return frozenset(modules) | {name for name, _ in block.named_parameters() if name.rpartition(".")[0] in modules}


def _divided(split: BlockSplit) -> list[str]:
    return [name for name, reason in split.reasons.items() if not reason.startswith("whole")]


def _holders(name: str, block: nn.Module, tied: set[str]) -> frozenset[str]:
    """Modules, and parameters, of a block whose weights another module holds, too, in the block or elsewhere."""
    every = list(block.named_parameters(remove_duplicate=False))
    times = Counter(id(parameter) for _, parameter in every)
    held = [full for full, parameter in every if times[id(parameter)] > 1 or f"{name}.{full}" in tied]
    return frozenset(found for parameter in held for found in (parameter, parameter.rpartition(".")[0]))
