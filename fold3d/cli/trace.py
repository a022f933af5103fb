"""`fold3d trace`: the blocks of a model, what they cost, and how they divide into chunks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fold3d.cli import model_option
from fold3d.cli.model_option import count, size
from fold3d.cli.tables import sharding_table
from fold3d.config import parse_tp_plan
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fold3d.trace import BlockCost, Trace


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    made = subcommands.add_parser("trace", help="show the blocks of a model and their cost", description=__doc__)
    model_option.add(made)
    made.add_argument("-p", "--pp", type=int, help="stages: also show the chunks")
    made.add_argument("-s", "--segments", type=int, help="parts of the model, each cut into pp: also show them")
    made.add_argument(
        "-t", "--tp", type=int, help="processes that share each layer: show how each of its weights is divided, and why"
    )
    made.add_argument(
        "--tp-plan", metavar="JSON", help='modules of which you know better, as {"mlp.gate": "replicate"}; with --tp'
    )
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the table. Raises: ConfigError or TraceError."""
    for name in ("pp", "segments", "tp"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    from fold3d.trace import trace

    model, example = model_option.load(options)
    chunks = (options.pp or 1) * (options.segments or 1)
    traced = trace(model, blocks=options.blocks, partition=options.partition, example=example, chunks=chunks)
    print(model_option.describe(model))
    if example is not None:
        print(f"FLOPs of one forward on {model_option.shapes_of(example)}")
    _print_blocks(traced)
    if options.tp_plan is not None and options.tp is None:
        raise ConfigError("--tp-plan has no effect without --tp")
    if options.tp is not None:
        _print_sharding(model, traced, example, options.tp, parse_tp_plan("--tp-plan", options.tp_plan))
    if options.pp is not None or options.segments is not None:
        _print_chunks(model, traced, options.pp or 1, options.segments or 1)


def _print_rows(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_blocks(traced: Trace) -> None:
    from fold3d.trace.model_trace import stack_of

    def row(place: str, cost: BlockCost, name: str, crossing: str = "", note: str = "") -> tuple[str, ...]:
        return place, name, count(cost.parameters), count(cost.flops), crossing, note

    crossing = [size(sum(one.bytes for one in border)) if border else "" for border in traced.crossings]
    notes = [f"no cut before it: {reason}" if reason else "" for reason in traced.borders]
    rows = [row("before", traced.prologue_cost, ", ".join(traced.prologue) or "-")]
    rows += [row(str(k), cost, cost.name, crossing[k], notes[k]) for k, cost in enumerate(traced.costs)]
    rows.append(row("after", traced.epilogue_cost, ", ".join(traced.epilogue) or "-"))
    print()
    _print_rows(("block", "name", "parameters", "FLOPs", "received", ""), rows)
    if len(traced.stacks) > 1:
        named = (f"{stack_of(traced.blocks[lo]) or 'the model itself'} ({lo}..{hi - 1})" for lo, hi in traced.stacks)
        print(f"stacks: {', '.join(named)}")
    for group in traced.tied:
        print(f"one tensor: {' = '.join(group)}")
    if traced.shared:
        print(f"in every chunk: {', '.join(traced.shared)}")


def _print_sharding(
    model: nn.Module, traced: Trace, example: Mapping[str, Any] | None, tp: int, overrides: Mapping[str, str] | None
) -> None:
    header, rows, below = sharding_table(model, traced, example, tp, overrides)
    print()
    _print_rows(header, rows)
    for line in below:
        print(line)


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
                count(sum(p.numel() for p in held.values())),
                f"{100 * flops / max(1, total):.1f} %",
            )
        )
    print()
    _print_rows(("chunk", "segment", "stage", "blocks", "parameters", "FLOPs"), rows)
