"""`fold3d trace`: the blocks of a model, what they cost, and how they divide into chunks."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fold3d.cli import model_option
from fold3d.cli.model_option import count, size
from fold3d.cli.tables import columns, sharding_table
from fold3d.config import parse_tp_plan
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fold3d.trace import BlockCost, Trace


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    command = subcommands.add_parser("trace", help="show the blocks of a model and their cost", description=__doc__)
    model_option.add(command)
    command.add_argument("-p", "--pp", type=int, help="pipeline stages; also prints the chunks")
    command.add_argument("-s", "--segments", type=int, help="segments, each cut into pp chunks; also prints the chunks")
    command.add_argument(
        "-t", "--tp", type=int, help="tensor-parallel ranks; also prints how each weight is divided, and why"
    )
    command.add_argument(
        "--tp-plan", metavar="JSON", help='overrides for modules, such as {"mlp.gate": "replicate"}; with --tp'
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the table. Raises: ConfigError or TraceError."""
    for name in ("pp", "segments", "tp"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    from fold3d.trace import trace

    if options.tp_plan is not None and options.tp is None:
        raise ConfigError("--tp-plan has no effect without --tp")
    model_option.say(f"reading {options.model}")
    model, example = model_option.load(options)
    pp, segments = options.pp or 1, options.segments or 1
    traced = trace(model, blocks=options.blocks, partition=options.partition, example=example, chunks=pp * segments)
    chunks = _chunks(model, traced, pp, segments) if options.pp or options.segments else None
    sharding = None
    if options.tp is not None:
        sharding = sharding_table(model, traced, example, options.tp, parse_tp_plan("--tp-plan", options.tp_plan))
    if options.json:
        made = {
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "blocks": _blocks(traced),
            "tied": traced.tied,
            "chunks": chunks,
            "sharding": None if sharding is None else [asdict(row) for row in sharding[0]],
        }
        print(json.dumps(made, indent=2))
        return
    print(model_option.describe(model))
    if example is not None:
        print(f"FLOPs of one forward on {model_option.shapes_of(example)}")
    _print_blocks(traced)
    if sharding is not None:
        rows, below = sharding
        print()
        cells = [(row.name, row.split, size(row.whole), size(row.rank), row.reason) for row in rows]
        print("\n".join([*columns([("module", "split", "whole", "a rank", ""), *cells], numbers=False), *below]))
    if chunks is not None:
        _print_chunks(chunks)


def _blocks(traced: Trace) -> list[dict[str, Any]]:
    """Returns a row for what runs before the blocks, for each block, and for what runs behind them."""

    def row(
        place: int | str, cost: BlockCost, name: str, received: int | None = None, note: str = ""
    ) -> dict[str, Any]:
        numbers = {"parameters": cost.parameters, "flops": cost.flops, "received_bytes": received}
        return {"block": place, "name": name} | numbers | {"note": note}

    received = [sum(one.bytes for one in border) if border else None for border in traced.crossings]
    notes = [f"no cut before it: {reason}" if reason else "" for reason in traced.borders]
    rows = [row("before", traced.prologue_cost, ", ".join(traced.prologue) or "-")]
    rows += [row(k, cost, cost.name, received[k], notes[k]) for k, cost in enumerate(traced.costs)]
    return [*rows, row("after", traced.epilogue_cost, ", ".join(traced.epilogue) or "-")]


def _collapsed(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the rows as text; those of blocks that follow each other and differ by their number alone are one."""
    made: list[tuple[str, ...]] = []
    for key, alike in itertools.groupby(rows, lambda one: (isinstance(one["block"], int), _kind(one))):
        same = list(alike)
        first, last = same[0], same[-1]
        place, name = str(first["block"]), first["name"]
        if len(same) > 1:
            place, name = f"{place}..{last['block']}", f"{key[1][0]}{_number(first)}..{_number(last)}"
        received = "" if first["received_bytes"] is None else size(first["received_bytes"])
        made.append(
            (place, name, count(first["parameters"]), count(first["flops"], billion="G"), received, first["note"])
        )
    return made


def _number(row: dict[str, Any]) -> str:
    return str(row["name"]).rpartition(".")[2]


def _kind(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what rows share that are printed as one: the name without its number, and the rest."""
    stem = row["name"].removesuffix(_number(row)) if _number(row).isdecimal() else row["name"]
    return stem, row["parameters"], row["flops"], row["received_bytes"], row["note"]


def _print_blocks(traced: Trace) -> None:
    from fold3d.trace.model_trace import stack_of

    print()
    head = ("block", "name", "parameters", "FLOPs", "received", "")
    print("\n".join(columns([head, *_collapsed(_blocks(traced))], numbers=False)))
    if len(traced.stacks) > 1:
        named = (f"{stack_of(traced.blocks[lo]) or 'the model itself'} ({lo}..{hi - 1})" for lo, hi in traced.stacks)
        print(f"stacks: {', '.join(named)}")
    for group in traced.tied:
        print(f"one tensor: {' = '.join(group)}")
    if traced.shared:
        print(f"in every chunk: {', '.join(traced.shared)}")


def _chunks(model: nn.Module, traced: Trace, pp: int, segments: int) -> list[dict[str, Any]]:
    from fold3d.placement.layers import chunk_parameters
    from fold3d.placement.partition import split_ranges
    from fold3d.topology import segment_of, stage_of

    ranges = split_ranges(traced, pp * segments)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rows = []
    for chunk, (lo, hi) in enumerate(ranges):
        needed = chunk_parameters(list(parameters), traced, ranges, chunk)
        held = {id(parameters[name]): parameters[name] for name in needed}
        flops = sum(cost.flops for cost in traced.costs[lo:hi])
        flops += traced.prologue_cost.flops if chunk == 0 else 0
        flops += traced.epilogue_cost.flops if chunk == len(ranges) - 1 else 0
        place = {"chunk": chunk, "segment": segment_of(chunk, pp), "stage": stage_of(chunk, pp)}
        rows.append(
            place | {"blocks": [lo, hi - 1], "parameters": sum(p.numel() for p in held.values()), "flops": flops}
        )
    return rows


def _print_chunks(rows: Sequence[dict[str, Any]]) -> None:
    total = max(1, sum(row["flops"] for row in rows))
    texts = [
        (
            *(str(row[name]) for name in ("chunk", "segment", "stage")),
            "..".join(map(str, row["blocks"])),
            count(row["parameters"]),
            f"{100 * row['flops'] / total:.1f} %",
        )
        for row in rows
    ]
    print()
    head = ("chunk", "segment", "stage", "blocks", "parameters", "FLOPs")
    print("\n".join(columns([head, *texts], numbers=False)))
