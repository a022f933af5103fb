"""trace(): records one forward of a model on fake tensors, without memory and without data."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fold3d.config import AUTO, BLOCKS, GRAPH, Partition
from fold3d.device import library_rng_state, same_library_rng_state, set_library_rng_state
from fold3d.errors import TraceError
from fold3d.trace.arguments import Form, form_of, loss_in
from fold3d.trace.batches import is_transformers_model, synthetic_example
from fold3d.trace.blocks import find_blocks, is_alone, no_blocks
from fold3d.trace.compound import is_compound
from fold3d.trace.graph import CallTree, trace_graph
from fold3d.trace.model_trace import BlockCost, Trace, regions_of, stack_of
from fold3d.trace.module_results import TreeStructure
from fold3d.trace.recorder import Recorder
from fold3d.trace.shadow import Shadow, shadow_of
from fold3d.trace.state import OF_EVERY_MODULE, tensors_in
from fold3d.trace.without_values import NEEDS_VALUES, WholeAttention, WithoutMemory

_NOT_THE_MODELS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


def trace(
    model: nn.Module,
    *,
    blocks: str = "auto",
    partition: Partition = BLOCKS,
    example: Mapping[str, Any] | None = None,
    chunks: int = 1,
) -> Trace:
    """Returns what one forward of `model` says about its blocks and what lies around them.

    Runs `model(**example)` in training mode on a copy whose tensors have shapes but no storage
    (FakeTensorMode), so a model on the meta device of any size takes seconds and almost no memory. The model
    itself is not touched.

    Args:
        model: a transformers model or any module; parameters may be real or on the meta device.
        blocks: see `find_blocks`.
        partition: "blocks": those; "graph": what `trace_graph` chooses; or the names of the modules that are to be the
            blocks.
        example: keyword arguments of the model's forward; tensors of any device, only shape and dtype matter. May
            be `Arguments` of one of the modules that the blocks lie in. None: made up for transformers models.
        chunks: into how many parts the model is to be cut, as far as that is known; "graph" looks for so many.
    Raises: TraceError if the blocks cannot be found, an example is needed, or the forward cannot run on fake tensors.
    """
    if partition != GRAPH:
        names = find_blocks(model, blocks, partition)
        given = example_for(model) if example is None else example
        found = trace_call(model, names, given, skips=(blocks, partition) == (AUTO, BLOCKS))
        if (blocks, partition) == (AUTO, BLOCKS) and is_alone(model, found.blocks):
            raise no_blocks(model)
        return found
    given = example_for(model) if example is None else example
    with shadow_of(model) as shadow:
        tree = CallTree(shadow.model)
        run_forward(shadow, given, tree)
    return trace_graph(model, tree, lambda units: trace_call(model, units, given), chunks)


def example_for(model: nn.Module) -> Mapping[str, Any]:
    """Returns a made-up example for a transformers model. Raises: TraceError for others."""
    if not is_transformers_model(model):
        raise TraceError(
            f"{type(model).__name__} is no transformers model, so an example batch is needed to record "
            "it: pass `example`, a dict of tensors as its forward takes them."
        )
    return synthetic_example(model)


def trace_call(
    model: nn.Module, blocks: list[str], example: Mapping[str, Any], *, skips: bool = False, as_it_is: bool = False
) -> Trace:
    """Returns what one forward of `model` on `example` says about `blocks`; see `trace`.

    Args:
        skips: some of the blocks need not run, in any forward that decides by its arguments alone.
        as_it_is: each module trains, or evaluates, as it does in the model; else all train.
    """
    before = library_rng_state()
    with shadow_of(model) as shadow:
        for copied, module in zip(shadow.model.modules(), model.modules() if as_it_is else (), strict=False):
            copied.training = module.training
        recorder, kept = _record(shadow, blocks, example)
        inside = tuple(f"{block}." for block in blocks)
        buffers = shadow.model.named_buffers()
        behind = [name for name, one in buffers if not name.startswith(inside) and recorder.is_behind(one)]
        changed, not_behind = recorder.state_behind()
        decisions, converted = shadow.mode.known.decisions(), _converted(model, shadow.model)
    drawn, in_front = library_rng_state(), recorder.drawn_in_front
    set_library_rng_state(before)
    missing = [name for name in _of_stacks_that_run(blocks, recorder.order) if name not in recorder.order]
    if missing and not (skips and recorder.order and same_library_rng_state(before, drawn)):
        said = (
            f"block '{missing[0]}' did not run in a training forward of the example ({len(missing)} of {len(blocks)} "
        )
        if isinstance(model.get_submodule(missing[0]), (nn.ModuleList, nn.ModuleDict)):
            raise TraceError(
                f"{said}blocks did not): it is a {type(model.get_submodule(missing[0])).__name__}, which holds modules "
                "and is not called itself. Make it a module with a forward, name modules that are called one after the "
                'other with the setting `blocks`, or set partition="graph".'
            )
        raise TraceError(
            f"{said}blocks did not). Blocks that are skipped at random cannot be cut between: switch that off (such as "
            "layerdrop), or choose other blocks with the setting `blocks`."
        )
    found = _summarise(model, recorder, form_of(example), kept, tuple(missing))
    return replace(
        found,
        decisions=decisions,
        converted=converted,
        behind=tuple(dict.fromkeys((*behind, *changed))),
        not_behind=tuple(not_behind),
        draws=in_front is not None and not same_library_rng_state(in_front, drawn),
    )


def _record(shadow: Shadow, names: list[str], example: Mapping[str, Any]) -> tuple[Recorder, dict[str, int]]:
    """Returns what was recorded, and the attributes in which modules keep tensors of the forward, each with the first
    region from which it has any."""
    recorder = Recorder(shadow.model, names)
    before = {id(tensor) for _, tensor in (*attributes(shadow.model), *shadow.model.named_buffers())}
    only_loss = getattr(example, "only_loss", False)

    def read(result: Any) -> None:
        loss = loss_in(result) if only_loss else None
        recorder.read_result(result if loss is None else loss)

    run_forward(shadow, example, recorder, read)
    kept = [(name, tensor) for name, tensor in attributes(shadow.model) if id(tensor) not in before]
    for name, tensor in kept:
        recorder.note_kept(name, tensor)
    for name, buffer in shadow.model.named_buffers():
        if id(buffer) not in before:
            recorder.note_left(name, buffer)
    regions: dict[str, int] = {}
    for name, tensor in kept:
        regions[name] = min(recorder.made_in(tensor), regions.get(name, len(names)))
    return recorder, regions


def _converted(model: nn.Module, after: nn.Module) -> tuple[tuple[str, torch.dtype], ...]:
    """Returns the parameters whose copies have another dtype after the forward than they have, and those dtypes."""
    before = dict(model.named_parameters(remove_duplicate=False))
    pairs = ((name, copied.dtype) for name, copied in after.named_parameters(remove_duplicate=False))
    return tuple(
        (name, dtype)
        for name, dtype in pairs
        if name in before and before[name].dtype != dtype and not is_compound(before[name])
    )


def run_forward(
    shadow: Shadow,
    example: Mapping[str, Any],
    watch: TorchDispatchMode,
    result: Callable[[Any], None] = lambda _: None,
) -> None:
    """Runs the forward while `watch` is told of every operation, and hands over what it returned.

    Raises: TraceError when the forward cannot run without values; what `watch` and `result` raise of it.
    """
    arguments = shadow.arguments(example)
    try:
        with shadow.running(), torch.no_grad(), watch, WithoutMemory(), WholeAttention():
            result(shadow.call(arguments))
    except TraceError:
        raise
    except NEEDS_VALUES as error:
        tried = f" The block could not be run by itself to find out: {error.__cause__}." if error.__cause__ else ""
        raise TraceError(
            f"{type(shadow.model).__name__} could not be recorded: {place_of(error)} decides what to compute by a "
            f"value ({error}) that does not follow from the batch alone, but from weights, a buffer, a number "
            f"drawn at random (such as layerdrop) or an example without values.{tried} Switch that off, keep a value "
            "for a log as a tensor (.detach() instead of .item()), pass as `example` a batch with values, or set pp=1, "
            "tp=1 and segments=1."
        ) from error
    except Exception as error:
        raise TraceError(
            f"{type(shadow.model).__name__} could not be recorded: its forward failed on the example "
            f"{ {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in example.items()} } with "
            f"{type(error).__name__}: {error}. If the model says so with pp=1 and segments=1, too, mend that first "
            "(its configuration, or the batch); else check that `example` has the keys and shapes of a training "
            "batch: the forward is run on tensors without the values of weights."
        ) from error


def place_of(error: BaseException) -> str:
    """Returns where in the model's code an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = next((one for one in reversed(frames) if not one.filename.startswith(_NOT_THE_MODELS)), None)
    if inner is None:
        return "its forward"
    return f"'{inner.line}' ({inner.filename.rpartition('site-packages' + os.sep)[2]}:{inner.lineno})"


def attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in attributes of modules, or in containers and objects there, besides parameters and
    buffers."""
    seen = set[int]()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in OF_EVERY_MODULE and not callable(value):
                for tensor in tensors_in(value, seen):
                    yield f"{name}.{attribute}".lstrip("."), tensor


def _summarise(
    model: nn.Module, recorder: Recorder, form: Form, kept: dict[str, int], skipped: tuple[str, ...]
) -> Trace:
    regions = recorder.regions
    last = len(recorder.order)
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    tied = tied_groups(model)
    aliases = {name: group for group in tied for name in group}
    canonical = {name: group[0] for group in tied for name in group}
    # What code outside any block or module reads before the last block runs on every chunk, so every chunk
    # needs it.
    ancestors = {name for name in sizes if _held_by_ancestor(name, recorder.order)}
    shared = ancestors | {name for region in regions[:last] for name in region.direct}
    shared |= {alias for name in shared for alias in aliases.get(name, ())}
    uses = [{alias for name in r.parameters for alias in aliases.get(name, (name,))} for r in regions]
    used = set().union(*uses) | shared
    unread = {name for name in sizes if name not in used}
    for name, region in regions_of(list(sizes), recorder.order):
        if name in unread:
            uses[region].add(name)

    def count(parameters: set[str]) -> int:
        return sum(sizes[name] for name in {canonical.get(name, name) for name in parameters})

    def within(block: str) -> set[str]:
        return {name for name in sizes if name.startswith(f"{block}.")}

    costs = tuple(
        BlockCost(
            name=block,
            parameters=count(within(block) if k == 0 else uses[k] - shared),
            flops=regions[k].block_flops + (regions[k].other_flops if k > 0 else 0),
        )
        for k, block in enumerate(recorder.order)
    )
    order = list(sizes)
    borders, crossings, hooked = recorder.borders(), recorder.crossings(), recorder.hooked()
    inside = {call.module for calls in hooked for call in calls}
    read = next((value.module for one in crossings[last] for value in one.values if value.module in inside), None)
    return Trace(
        blocks=tuple(recorder.order),
        prologue=tuple(regions[0].modules),
        epilogue=tuple(regions[last].modules),
        between=tuple(dict.fromkeys(m for region in regions[1:last] for m in region.modules)),
        around=tuple(tuple(region.modules) for region in regions),
        shared=tuple(name for name in order if name in shared),
        direct=tuple(name for name in order if any(name in region.direct for region in regions)),
        uses=tuple(tuple(name for name in order if name in use) for use in uses),
        tied=tied,
        structures=tuple(
            TreeStructure.of(output, block) for output, block in zip(recorder.outputs, recorder.order, strict=True)
        ),
        shapes=recorder.shapes(),
        modified=recorder.modified(),
        borders=borders[:last],
        crossings=crossings[:last],
        head_border=borders[last]
        if read is None
        else f"what '{read}' returned is read behind the blocks, and each rank has a part of it",
        head_crossings=crossings[last],
        leaks=recorder.leaks(),
        hooked=hooked,
        costs=costs,
        prologue_cost=BlockCost(
            name="prologue",
            parameters=count(uses[0] - within(recorder.order[0])),
            flops=regions[0].other_flops,
        ),
        epilogue_cost=BlockCost(name="epilogue", parameters=count(uses[last]), flops=regions[last].other_flops),
        unread=tuple(name for name in order if name in unread),
        form=form,
        kept=tuple(kept),
        kept_of=tuple(kept.values()),
        skipped=skipped,
    )


def _of_stacks_that_run(names: list[str], order: list[str]) -> list[str]:
    """Returns the blocks of those stacks of which any block ran; all, if none did."""
    running = {stack_of(name) for name in order}
    return [name for name in names if stack_of(name) in running or not order]


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of parameter names that are one tensor, each in registration order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _held_by_ancestor(parameter: str, blocks: list[str]) -> bool:
    holder = parameter.rpartition(".")[0]
    return holder == "" or any(block.startswith(f"{holder}.") for block in blocks)
