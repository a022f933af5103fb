"""`fold3d trace`: the blocks of a model, what they cost, and how they divide into chunks."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fold3d.trace import BlockCost, Trace


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    made = subcommands.add_parser("trace", help="show the blocks of a model and their cost", description=__doc__)
    made.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a transformers folder or config.json (weights are not read), or MODULE:FUNCTION, a function without "
        "arguments that returns a module, or a module and an example batch (a dict of tensors)",
    )
    made.add_argument("-p", "--pp", type=int, help="stages: also show the chunks")
    made.add_argument("-s", "--segments", type=int, help="parts of the model, each cut into pp: also show them")
    made.add_argument("--blocks", default="auto", help="name of the list of blocks, default: found by themselves")
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the table. Raises: ConfigError or TraceError."""
    from fold3d.trace import trace
    from fold3d.trace.example import is_transformers_model, synthetic_example

    for name in ("pp", "segments"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    model, example = _load(options.model)
    if example is None and is_transformers_model(model):
        example = synthetic_example(model)
    traced = trace(model, blocks=options.blocks, example=example)
    print(f"{type(model).__name__}, {_count(sum(p.numel() for p in model.parameters()))} parameters")
    if example is not None:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in example.items() if hasattr(value, "shape"))
        print(f"FLOPs of one forward on {shapes}")
    _print_blocks(traced)
    if options.pp is not None or options.segments is not None:
        _print_chunks(model, traced, options.pp or 1, options.segments or 1)


def _load(source: str) -> tuple[nn.Module, Mapping[str, Tensor] | None]:
    """Returns the model on the meta device and its example batch, if there is one."""
    import torch

    from fold3d.trace.from_config import model_from_config

    if os.path.exists(source):
        return model_from_config(source), None
    module_name, colon, function_name = source.partition(":")
    if not colon:
        raise ConfigError(
            f"{source!r} is neither a folder, nor a config.json, nor MODULE:FUNCTION (as in my_package.models:build)"
        )
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source!r}: {error}") from None
    with torch.device("meta"):
        result = function()
    model, example = result if isinstance(result, tuple) else (result, None)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{source!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model, example


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"


def _print_rows(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_blocks(traced: Trace) -> None:
    def row(place: str, cost: BlockCost, name: str, note: str = "") -> tuple[str, ...]:
        return place, name, _count(cost.parameters), _count(cost.flops), note

    notes = [f"no cut before it: {reason}" if reason else "" for reason in traced.borders]
    rows = [row("before", traced.prologue_cost, ", ".join(traced.prologue) or "-")]
    rows += [row(str(k), cost, cost.name, note) for k, (cost, note) in enumerate(zip(traced.costs, notes, strict=True))]
    rows.append(row("after", traced.epilogue_cost, ", ".join(traced.epilogue) or "-"))
    print()
    _print_rows(("block", "name", "parameters", "FLOPs", ""), rows)
    for group in traced.tied:
        print(f"one tensor: {' = '.join(group)}")
    if traced.shared:
        print(f"in every chunk: {', '.join(traced.shared)}")


def _print_chunks(model: nn.Module, traced: Trace, pp: int, segments: int) -> None:
    from fold3d.placement.layers import chunk_parameters
    from fold3d.placement.partition import split_ranges
    from fold3d.topology import segment_of, stage_of

    ranges = split_ranges(traced, pp * segments)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    total = traced.prologue_cost.flops + traced.epilogue_cost.flops + sum(cost.flops for cost in traced.costs)
    rows = []
    for chunk, (lo, hi) in enumerate(ranges):
        needed = chunk_parameters(list(parameters), traced, ranges, chunk)
        held = {id(parameters[name]): parameters[name] for name in needed}
        flops = sum(cost.flops for cost in traced.costs[lo:hi])
        flops += traced.prologue_cost.flops if chunk == 0 else 0
        flops += traced.epilogue_cost.flops if chunk == len(ranges) - 1 else 0
        rows.append(
            (
                str(chunk),
                str(segment_of(chunk, pp)),
                str(stage_of(chunk, pp)),
                f"{lo}..{hi - 1}",
                _count(sum(p.numel() for p in held.values())),
                f"{100 * flops / max(1, total):.1f} %",
            )
        )
    print()
    _print_rows(("chunk", "segment", "stage", "blocks", "parameters", "FLOPs"), rows)
