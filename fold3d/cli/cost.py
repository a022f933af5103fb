"""`fold3d cost`: what a training costs on machines of several kinds, and which of them meets a deadline for least."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fold3d.cli import model_option
from fold3d.cli.model_option import ModelLayers
from fold3d.cli.tables import columns
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.cluster.cost import MachinePlan, Offer, Terms
    from fold3d.cluster.devices import Machine
    from fold3d.cluster.rates import Measured
    from fold3d.plan.job import TrainingJob
    from fold3d.plan.search import Found
    from fold3d.plan.space.mesh import Mesh, Tried


_FREE = 0.9
"""The part of a GPU's memory that a training can use: the rest is CUDA's, NCCL's, and gaps between allocations."""
_LENGTH = 2048
"""Tokens of a sample where nobody has said them and the model takes more."""
_LATENCY_WITHIN, _LATENCY_BETWEEN = 10e-6, 50e-6
"""Seconds of a message."""


class MachinePlans:
    """The planner's answers for a model on machines of several kinds. The model is recorded once; speeds, memory and
    links differ."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Args:
        options: `model`, `blocks`, `partition`, and `sample_tokens`, `batch`, `global_samples`, `efficiency`.

        Raises: ConfigError, TraceError for a model that cannot be recorded.
        """
        import torch

        from fold3d.trace.batches import is_transformers_model

        model: Any
        model, example = model_option.load(options)
        dtype = model_option.dtype_of(options)
        model = model if dtype is None else model.to(getattr(torch, dtype))  # as `fold3d plan` does
        if example is None or set(example) != {"input_ids"}:
            raise ConfigError(f"{options.model!r} is no model whose input is input_ids alone: tokens cannot be counted")
        text = model.config.get_text_config() if is_transformers_model(model) else None
        most = getattr(text, "max_position_embeddings", None)
        length = options.sample_tokens or min(most or _LENGTH, _LENGTH)
        if most is not None and length > most:
            raise ConfigError(f"--sample-tokens is {length}; the model takes {most} at most")
        ids = example["input_ids"][:1, :1].expand(options.batch, length)
        self._options = options
        self._layers = ModelLayers(model, {"input_ids": ids}, blocks=options.blocks, partition=options.partition)
        self.tokens = options.global_samples * length
        """Of a step."""
        self.said = f"{model_option.describe(model)}; {options.global_samples} samples of {length} tokens a step"

    def of(self, machine: Machine) -> MachinePlan:
        """Returns the fastest plan; with a reason in place of one where there is none."""
        from fold3d.cluster.cost import MachinePlan
        from fold3d.config import text_of_bytes
        from fold3d.plan.layout import places
        from fold3d.plan.search import decide_jobs
        from fold3d.plan.space.mesh import meshes, search_meshes
        from fold3d.plan.strategy import Constraints

        def decided(jobs: list[TrainingJob]) -> list[Found]:
            return decide_jobs(jobs, Constraints(), lambda: True)

        try:
            candidates = meshes(
                machine.all_gpus,
                self._options.global_samples // self._options.batch,
                tp=None,
                pp=None,
                ranks_per_host=machine.gpus,
                most_stages=len(places(self._layers.trace)),
            )
        except ConfigError as error:
            return MachinePlan(machine=machine, rate=0.0, reason=str(error))
        best: Tried[Mesh] = search_meshes(candidates, lambda mesh: self._job(mesh, machine), decided)[0]
        if best.found is None or best.reason:
            needs = f": at least {text_of_bytes(best.found.memory_bytes)} a GPU" if best.found else ""
            return MachinePlan(machine=machine, rate=0.0, reason=f"{best.reason.splitlines()[0]}{needs}")
        proposal, mesh = best.found.proposal(), best.mesh
        return MachinePlan(
            machine=machine,
            rate=1e3 * self.tokens / proposal.step_ms,
            layout=f"dp={mesh.dp} tp={mesh.tp} pp={mesh.pp}",
            flags=self._flags(mesh, proposal.strategy),
            memory_bytes=proposal.memory_bytes,
        )

    def _flags(self, mesh: Mesh, strategy: Any) -> str:
        from fold3d.plan.space.registry import flags_of

        batch, steps = self._options.batch, mesh.micro_batches
        sizes = f"--dp {mesh.dp} --tp {mesh.tp} --pp {mesh.pp}"
        samples = f"--per_device_train_batch_size {batch} --gradient_accumulation_steps {steps}"
        return f"{sizes} {samples} {flags_of(strategy)}"

    def _job(self, mesh: Mesh, machine: Machine) -> TrainingJob:
        """Raises: ConfigError for a mesh that the model cannot have."""
        from fold3d.cluster.devices import known_device
        from fold3d.config import ParallelConfig
        from fold3d.plan.job import HostLink, Hosts

        hosts = Hosts(
            per_host=machine.gpus,
            between=HostLink((machine.network_gbit or machine.within_gbit) * 1e9 / 8, _LATENCY_BETWEEN),
            within=HostLink(machine.within_gbit * 1e9 / 8, _LATENCY_WITHIN),
        )
        flops, memory = machine.tflops * 1e12 * self._options.efficiency, int(machine.memory_gb * 1e9 * _FREE)
        known = known_device(machine.device)
        room = None if known is None else int(known.host * _FREE)
        shards = bool(ParallelConfig(tp=mesh.tp, pp=mesh.pp).sequence_parallel)
        more = {"memory_limit": memory, "pool_limit": room}
        return self._layers.job(mesh, flops, hosts, sequence_parallel=shards, **more)


_FORMATS = ("table", "json", "sbatch", "skypilot", "estimator")
_RESTART = 360.0
"""Seconds, where nothing was measured."""
_HARDLY = 1e-3
"""The least part of spot machines that last until a training has started on them."""
_TIMES = {"": 1.0, "h": 1.0, "m": 1.0 / 60.0, "d": 24.0}
_LONGEST = 1e6
"""Hours."""


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    command = subcommands.add_parser(
        "cost", help="compare the cost of a training on several kinds of machine", description=__doc__
    )
    model_option.add(command)
    command.add_argument("--tokens", type=float, required=True, metavar="N", help="tokens to train on, such as 20e9")
    command.add_argument(
        "--devices", required=True, metavar="KIND:COUNT,..", help="devices to compare, such as a100-80:8,h100:16"
    )
    command.add_argument(
        "--prices", required=True, metavar="FILE", help="CSV file with a machine per line; see docs/cost.md"
    )
    command.add_argument("--deadline", metavar="TIME", help="time limit, such as 48h, 90m, 3d; default: none")
    command.add_argument(
        "--rates", metavar="FILE", help="rates.json of an earlier run; measured rates replace predictions"
    )
    plan = command.add_argument_group("what is planned for")
    integer = partial(plan.add_argument, type=int)
    integer("--global-samples", default=64, metavar="N", help="samples per step; default 64")
    integer("--batch", default=1, metavar="N", help="samples per micro-batch; default 1")
    integer("--sample-tokens", metavar="N", help="tokens per sample; default: the model's maximum, at most 2048")
    plan.add_argument(
        "--efficiency", type=float, default=0.4, help="share of a GPU's peak that layers reach; default 0.4"
    )
    spot = command.add_argument_group("spot machines, where the prices have some")
    hours = partial(spot.add_argument, type=float, metavar="HOURS")
    hours("--spot-up", default=8.0, help="mean time until a spot machine is lost; default 8")
    hours("--spot-down", default=2.0, help="mean time until another one is available; default 2")
    spot.add_argument("--restart", metavar="TIME", help="time lost at each start; default: from --rates, else 6m")
    out = command.add_argument_group("output")
    out.add_argument("--format", choices=_FORMATS, default="table", help="output format; default table")
    out.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    out.add_argument(
        "--script",
        metavar="WORDS",
        help='script for sbatch and skypilot, such as "train.py --data x"; default train.py',
    )
    out.add_argument(
        "--output", metavar="FOLDER", help="output_dir of the training, for sbatch and skypilot; default out"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints what was asked for. Raises: ConfigError, TraceError."""
    from fold3d.cluster import devices, launch
    from fold3d.cluster.cost import offers
    from fold3d.cluster.rates import Measured

    _check(options)
    machines = devices.choose_machines(options.devices, devices.read_prices(Path(options.prices)))
    measured = Measured()
    if options.rates is not None:
        if not Path(options.rates).is_file():
            raise ConfigError(f"--rates {options.rates} is no file; name the rates.json of a run")
        measured = Measured.read(Path(options.rates))
        _check_rates(options.rates, measured, machines)
    terms = _terms(options, measured.save_seconds + measured.start_seconds or _RESTART)
    if math.exp(-terms.restart / terms.up) < _HARDLY:
        raise ConfigError(
            f"--spot-up is {terms.up:g} hours, and a start takes {terms.restart:.3g} hours: hardly any spot machine "
            "would last that long; raise it, lower --restart, or leave spot prices out"
        )
    known = MachinePlans(options)
    plans = []
    for machine in machines:
        print(f"planning for {machine.name}", file=sys.stderr, flush=True)
        plans.append(known.of(machine))
    found = offers(plans, measured, terms)
    if not found:
        reasons = "\n".join(f"  {one.machine.name}: {one.reason}" for one in plans)
        raise ConfigError(f"the model runs on none of --devices:\n{reasons}\nname others, or more of them")
    command, output = shlex.split(options.script or "train.py"), options.output or "out"
    if options.format == "table":
        print(known.said)
        print("\n".join(_table(found, plans, terms)))
    elif options.format == "json":
        print(json.dumps(_as_json(found, plans, terms), indent=2))
    elif not found[0].meets:
        raise ConfigError(_verdict(found[0], terms))
    elif options.format == "sbatch":
        print(launch.sbatch(found[0], command, output), end="")
    elif options.format == "skypilot":
        print(launch.skypilot(found, command, output), end="")
    else:
        print(launch.estimator(found, options.model, terms.tokens), end="")


def _check(options: argparse.Namespace) -> None:
    """Raises: ConfigError for a number that cannot be, or an option without effect."""
    from fold3d.cluster.fields import Field

    Field(options.tokens, "--tokens").number(above=0.0, most=1e18)
    Field(options.efficiency, "--efficiency").number(above=0.0, most=1.0)
    Field(options.spot_up, "--spot-up").number(above=0.0, most=_LONGEST, unit="in hours")
    Field(options.spot_down, "--spot-down").number(most=_LONGEST, unit="in hours")
    for name in ("global_samples", "batch", "sample_tokens"):
        value = getattr(options, name)
        if value is not None:
            Field(value, f"--{name.replace('_', '-')}").whole(least=1)
    if options.global_samples % options.batch:
        raise ConfigError(f"--global-samples {options.global_samples} is not divisible by --batch {options.batch}")
    for name in ("script", "output"):
        if getattr(options, name) is not None and options.format not in ("sbatch", "skypilot"):
            raise ConfigError(f"--{name} has no effect with --format {options.format}; it is for sbatch and skypilot")
    try:
        is_empty = options.script is not None and not shlex.split(options.script)
    except ValueError as error:
        raise ConfigError(f"--script {options.script!r} cannot be read as a shell's words: {error}") from None
    if is_empty:
        raise ConfigError("--script is empty; name the training's script")


def _check_rates(path: str, measured: Measured, machines: Sequence[Machine]) -> None:
    """Raises: ConfigError for measurements that would have no effect."""
    seen = {(one.kind, one.gpus) for one in measured.rates}
    if not seen & {(one.device, one.all_gpus) for one in machines}:
        has = ", ".join(f"{kind}:{gpus}" for kind, gpus in sorted(seen)) or "nothing"
        raise ConfigError(
            f"--rates {path} has measured {has}, none of which is in --devices; add it there, or leave it out"
        )


def _terms(options: argparse.Namespace, restart_seconds: float) -> Terms:
    from fold3d.cluster.cost import Terms

    return Terms(
        tokens=options.tokens,
        deadline=math.inf if options.deadline is None else _hours("--deadline", options.deadline),
        restart=restart_seconds / 3600.0 if options.restart is None else _hours("--restart", options.restart),
        up=options.spot_up,
        down=options.spot_down,
    )


def _hours(name: str, text: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d*)?)([hmd]?)", text)
    hours = float(found[1]) * _TIMES[found[2]] if found else 0.0
    if not 0.0 < hours <= _LONGEST:
        raise ConfigError(f"{name} {text!r} is no time; write 48h, 90m or 3d")
    return hours


def _table(found: Sequence[Offer], plans: Sequence[MachinePlan], terms: Terms) -> list[str]:
    """Returns the lines: a row for each machine, who runs on none, and what is cheapest."""
    names = list(dict.fromkeys(name for one in found for name in one.mixed))
    head = ("devices", "plan", "tokens/s", "", "GB", "an hour", "10^9 tokens", "hours", "at worst", "on demand")
    rows: list[tuple[str, ...]] = [(*head, *(f"spot, {name}" for name in names))]
    for one in found:
        mixed = (one.mixed.get(name) for name in names)
        machine = one.plan.machine
        rows.append(
            (
                machine.name,
                one.plan.layout,
                f"{one.known.rate:.4g} +- {one.known.error:.0%}",
                "measured" if one.known.measured else "predicted",
                f"{one.plan.memory_bytes / 1e9:.1f}",
                f"{machine.price * machine.count:.2f}",
                f"{one.dollars_per_1e9:.2f}",
                f"{one.hours:.1f}",
                f"{one.hours_at_worst:.1f}",
                f"{one.dollars:.2f}",
                *("" if mix is None else f"{mix.dollars:.2f}, {mix.late:.0%} late" for mix in mixed),
            )
        )
    lines = columns(rows)
    lines += [f"{one.machine.name}: {one.reason}" for one in plans if not one.rate]
    return [*lines, _verdict(found[0], terms)]


def _verdict(first: Offer, terms: Terms) -> str:
    """Returns what is cheapest, or that nothing is in time."""
    way, dollars = first.best
    until = f" by {terms.deadline:g} h" if math.isfinite(terms.deadline) else ""
    if first.meets:
        how = "on demand" if way == "on demand" else f"with spot machines by the rule {way}"
        return f"cheapest{until}: {first.plan.machine.name} {how}, {dollars:.2f}"
    best = f"{first.plan.machine.name} takes {first.hours:.1f} h, {first.hours_at_worst:.1f} h at worst"
    return f"nothing is sure to be done{until}: {best}; add GPUs to --devices, or measure (--rates)"


def _as_json(found: Sequence[Offer], plans: Sequence[MachinePlan], terms: Terms) -> dict[str, Any]:
    rows = [
        {
            "devices": one.plan.machine.name,
            "machine": asdict(one.plan.machine),
            "plan": one.plan.layout,
            "flags": one.plan.flags,
            "memory_bytes": one.plan.memory_bytes,
            "tokens_per_second": one.known.rate,
            "error": one.known.error,
            "source": "measured" if one.known.measured else "predicted",
            "hours": one.hours,
            "hours_at_worst": one.hours_at_worst,
            "meets_deadline": one.meets,
            "on_demand": one.dollars,
            "per_1e9_tokens": one.dollars_per_1e9,
            "spot": {name: asdict(mix) for name, mix in one.mixed.items()},
            "cheapest_way": one.best[0],
        }
        for one in found
    ]
    told = {name: value if math.isfinite(value) else None for name, value in asdict(terms).items()}
    refused = [{"devices": one.machine.name, "reason": one.reason} for one in plans if not one.rate]
    return {"terms": told, "offers": rows, "refused": refused}
