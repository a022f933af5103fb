"""`fold3d plan`: how a model would be trained on so many processes, and what a step would take."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fold3d.cli import cluster_option, model_option, rivals
from fold3d.cli.model_option import say as _say
from fold3d.cli.rivals import rivals_of
from fold3d.cli.tables import breakdown_table, columns, memory_table
from fold3d.config import AUTO, DELAY_CORRECTIONS, ParallelConfig, text_of_bytes
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fold3d.cli.model_option import ModelLayers
    from fold3d.plan.costs import Profile
    from fold3d.plan.job import TrainingJob
    from fold3d.plan.proposal import Proposal
    from fold3d.plan.search import Found, PlanProgress
    from fold3d.plan.space.mesh import Mesh, Tried
    from fold3d.plan.strategy import Constraints, Strategy

_MICRO_BATCHES = 8
_RANKS_PER_HOST = 8
_MESHES_SHOWN = 10
_SECONDS_BETWEEN_LINES = 2.0
_MOST_SAMPLES = 128
"""Of a micro-batch, in a search."""
_MOST_TOKENS = 2048
"""Of a sample, where nobody says and the model takes more."""
_LEAST = 1e-9
"""Of numbers that say how large or fast something is; 1 / _LEAST is the most."""
_OF_COST = 1e9
"""Tokens whose cost is said."""


def add(subcommands: Any, *, knobs: bool) -> None:
    """Adds the subcommand to the parser; its `knobs` only where they are asked for: their registry loads torch."""
    command = subcommands.add_parser("plan", help="plan the training of a model on a cluster", description=__doc__)
    model_option.add(command)
    integer = partial(command.add_argument, type=int)
    integer("-w", "--world-size", metavar="N", help="number of processes, one per device")
    command.add_argument("-p", "--pp", type=_axis, default=1, help="pipeline stages, or auto; default 1")
    command.add_argument("-t", "--tp", type=_axis, default=1, help="tensor-parallel ranks, or auto; default 1")
    integer("-m", "--micro-batches", metavar="M", help="micro-batches per step and replica; default 8; not with auto")
    integer("--global-micro-batches", metavar="M", help="micro-batches per step of all replicas; with auto")
    integer(
        *("--ranks-per-host", "--gpus-per-host"),
        metavar="N",
        help="GPUs per host; --tp auto stays within one; default 8. If given, the plan is compared with HSDP",
    )
    integer("--batch", metavar="N", help="samples per micro-batch; default 1")
    integer(
        "--global-samples",
        metavar="N",
        help="samples per step of all replicas; the planner then chooses --batch and the number of micro-batches",
    )
    integer(
        "--tokens",
        metavar="N",
        help=f"tokens per sample, for models with input_ids; default: the model's maximum, at most {_MOST_TOKENS}",
    )
    command.add_argument(
        "--dtype", choices=cluster_option.DTYPES, help="dtype of weights and activations; default: the configuration's"
    )
    command.add_argument(
        "--no-flush",
        action="store_true",
        help="do not drain the pipeline between steps (2BW); needs --gradient-delay 1, schedule 1f1b, one segment",
    )
    command.add_argument(
        "--delay-correction",
        choices=DELAY_CORRECTIONS,
        default="none",
        help="correction for --gradient-delay 1; default none",
    )
    command.add_argument("--memory-limit", metavar="SIZE", help="memory limit per process, such as 24GB; default: none")
    command.add_argument(
        "--strategy",
        metavar="TEXT",
        help="text that an earlier plan printed behind 'strategy: ', or a file with it; predicts what it costs here",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    costs = command.add_argument_group("cluster")
    number = partial(costs.add_argument, type=float)
    number("--tflops", metavar="T", help="TFLOP/s that a device sustains; default 50, or 45 %% of --device's peak")
    costs.add_argument(
        "--measure", action="store_true", help="time the layers on this machine instead of assuming --tflops"
    )
    number(
        "--bandwidth",
        metavar="GBIT",
        help="bandwidth per process, with --hosts that of a host's network card, each way; default 10",
    )
    number("--latency", metavar="US", help="latency of a message, in us; default 50")
    number("--copy-bandwidth", metavar="GB", help="GB/s between device and host memory, each way; default 25")
    cluster_option.add(costs)
    cluster_option.add_tp_link(costs)
    command.add_argument("--planner", choices=rivals.PLANNERS, help="also print what this planner would choose")
    command.set_defaults(run=run)
    if knobs:
        from fold3d.plan.space.registry import KNOBS

        fixed = command.add_argument_group("settings to fix; the planner chooses the others")
        for knob in KNOBS:
            names = {f"--{knob.name.replace('_', '-')}": None, f"--{knob.name}": None}  # as here, and as in the Trainer
            fixed.add_argument(*names, dest=knob.name, metavar="VALUE", help=knob.help)


def _axis(text: str) -> int | None:
    """Returns the size of an axis of the mesh, None for "auto"."""
    return None if text == AUTO else int(text)


def run(options: argparse.Namespace) -> None:
    """Prints the planner's table, the strategy as text and the breakdown of a step; of several devices a table of what
    each comes to. Raises: ConfigError, TraceError."""
    from fold3d.plan.memory_options import predicted_curves

    _say(f"reading {options.model}")
    of_devices = cluster_option.of_each_device(options)
    if len(of_devices) > 1:
        _compare(of_devices)
        return
    (options,) = of_devices
    planned = _answer(options)
    job, proposal, whole = planned.job, planned.proposal, planned.layers.whole
    if options.json:
        print(json.dumps(planned.to_dict(), indent=2))
        return
    needs, limit = text_of_bytes(proposal.memory_bytes), job.memory_limit
    print(f"fits: {needs} of {text_of_bytes(limit)}" if limit else f"needs {needs} on the fullest process")
    for line in planned.tables:
        print(line)
    print(proposal.table)
    print(f"  with the mesh: {planned.mesh_flags} and the above")
    more = ["--flush False"] if options.no_flush else []
    more += [] if options.delay_correction == "none" else [f"--delay_correction {options.delay_correction}"]
    if more:
        print(f"  and with {' '.join(more)}")
    print(f"strategy: {proposal.strategy}")
    print(planned.speed.words())
    for line in _against_rivals(options, job, proposal, whole):
        print(line)
    told = argparse.Namespace(**(vars(options) | {"tokens": planned.layers.tokens}))
    for line in rivals.lines(options.planner, told, job, whole) if options.planner else ():
        print(line)
    print(breakdown_table("stage", proposal.prediction))
    print(memory_table(predicted_curves(job, proposal.strategy)))


def _answer(options: argparse.Namespace, known: ModelLayers | None = None) -> _Planned:
    """Returns what is planned for one device. Raises: ConfigError where nothing fits, TraceError.

    Args:
        known: the model's layers, recorded for another device.
    """
    from fold3d.plan.space.registry import KNOBS, constrained
    from fold3d.plan.strategy import Constraints

    for knob in KNOBS:
        if getattr(options, knob.name) == AUTO:  # the planner's choice, as where nothing is said
            setattr(options, knob.name, None)
    strategy = None if options.strategy is None else _given(options)
    _settle(options)
    if options.no_flush:  # nothing else goes without one
        vars(options).update(schedule=options.schedule or "1f1b", segments=options.segments or "1")
    if strategy is not None:
        constraints = Constraints.of(strategy)
    else:
        given = {knob: getattr(options, knob.name) for knob in KNOBS}
        constraints = constrained(**{k.name: k.read(text) for k, text in given.items() if text is not None})
    if options.global_samples is None:
        batch = {"batch": options.batch or 1}
        planned = _planned(argparse.Namespace(**(vars(options) | batch)), constraints, known)
    else:
        planned = _best_batch(options, constraints)
    job, proposal = planned.job, planned.proposal
    if job.memory_limit is not None and proposal.memory_bytes > job.memory_limit:
        raise ConfigError(
            f"{proposal.table}\nnothing fits: stage {proposal.fullest_stage} needs at least "
            f"{text_of_bytes(proposal.memory_bytes)} of {text_of_bytes(job.memory_limit)}; raise --memory-limit or "
            "--pp, or lower --batch"
        )
    return planned


def _compare(of_devices: Sequence[argparse.Namespace]) -> None:
    """Prints a row for each device, or why the model does not run on it; with --json, a list. Raises: TraceError."""
    known: ModelLayers | None = None
    rows: list[tuple[str, ...]] = [("device", "step", "", "memory", "plan")]
    found: list[dict[str, Any]] = []
    below = []
    for options in of_devices:
        name = str(options.device)
        try:
            planned = _answer(options, known)
        except ConfigError as error:
            below.append(f"{name}: {str(error).splitlines()[-1]}")
            found.append({"device": name, "reason": str(error)})
            continue
        known = planned.layers.known if options.global_samples is None else None
        best = planned.proposal
        mesh = f"dp={best.strategy.dp} tp={best.strategy.tp} pp={best.strategy.pp}"
        step, needs = f"{best.step_ms:.1f} ms", text_of_bytes(best.memory_bytes)
        rows.append((name, step, planned.speed.words(), needs, f"{mesh}: {best.strategy.name}"))
        found.append({"device": name} | planned.to_dict())
    if not any("strategy" in one for one in found):
        raise ConfigError("\n".join(["the model runs on none of the devices:", *below]))
    if of_devices[0].json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join([*columns(rows), *below]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Speed:
    """What a step of so many milliseconds comes to, of all processes together."""

    tokens_per_second: float | None
    """None for models without tokens."""
    utilisation: float
    """FLOPs of the model, without what is computed again, as a share of `of_flops` a device."""
    of_flops: float
    is_peak: bool
    """Whether that is the device's peak: then it is called MFU."""
    cost: float | None
    """Of _OF_COST tokens; None without a price."""

    def words(self) -> str:
        """Returns a line for people."""
        share = f"{'MFU' if self.is_peak else 'busy'} {100 * self.utilisation:.1f} %"
        tokens = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f} tokens/s, "
        return f"{tokens}{share} of {self.of_flops / 1e12:g} TFLOP/s" + (
            "" if self.cost is None else f", {self.cost:,.2f} for 10^9 tokens"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """What the planner was told and says, of the best mesh."""

    job: TrainingJob
    proposal: Proposal
    layers: _Layers
    options: argparse.Namespace
    tried: Sequence[Tried[Mesh]] = ()
    """The meshes that were compared."""
    tables: Sequence[str] = ()
    """What else is to be said of the comparison."""

    @property
    def mesh_flags(self) -> str:
        """The Trainer's arguments of the mesh and the micro-batches."""
        one = self.proposal.strategy
        sizes = f"--dp {one.dp} --tp {one.tp} --pp {one.pp} --gradient_accumulation_steps {one.micro_batches}"
        return f"{sizes} --per_device_train_batch_size {self.options.batch}"

    @property
    def speed(self) -> _Speed:
        """Of the proposal."""
        return self.layers.speed(self.proposal.step_ms, self.job.dp * self.job.micro_batches)

    def to_dict(self) -> dict[str, Any]:
        """Returns what --json prints: bytes, seconds and tokens as numbers, None for what is not known."""
        job, proposal = self.job, self.proposal

        def entry(step_ms: float | None, memory_bytes: int | None) -> dict[str, Any]:
            speed = None if step_ms is None else self.layers.speed(step_ms, job.dp * job.micro_batches)
            return {
                "step_seconds": None if step_ms is None else step_ms / 1e3,
                "memory_bytes": memory_bytes,
                "tokens_per_second": None if speed is None else speed.tokens_per_second,
                "utilisation": None if speed is None else speed.utilisation,
                "cost_of_1e9_tokens": None if speed is None else speed.cost,
            }

        return {
            "strategy": str(proposal.strategy),
            "flags": f"{self.mesh_flags} {proposal.flags}",
            "memory_limit": job.memory_limit,
            "pool_limit": job.pool_limit,
            "pool_bytes": max(peak.pool for peak in proposal.peaks),
            "exposed_seconds": _exposed_ms(proposal) / 1e3,
            **entry(proposal.step_ms, proposal.memory_bytes),
            "meshes": [
                {"dp": one.mesh.dp, "tp": one.mesh.tp, "pp": one.mesh.pp, "micro_batches": one.mesh.micro_batches}
                | entry(one.step_ms, None if one.found is None or one.step_ms is None else one.found.memory_bytes)
                | {"reason": one.reason or None}
                for one in self.tried
            ],
        }


def _exposed_ms(proposal: Proposal) -> float:
    """Returns for how long the stage that waits most waits for the network."""
    return max(one.exposed_tp_ms + one.exposed_pp_ms + one.exposed_dp_ms for one in proposal.prediction.ranks)


def _against_rivals(options: argparse.Namespace, job: TrainingJob, proposal: Proposal, whole: Profile) -> list[str]:
    """Returns how the plan compares with data parallelism of the whole model, a line each."""
    count, per_host = options.world_size, options.ranks_per_host
    if per_host is not None and 1 < count <= per_host:
        return [f"all {count} processes are on one host: where the model fits, take FSDP, whose sums stay inside"]
    hosts = options.placement
    rivals = rivals_of(
        whole,
        bandwidth=job.network.bandwidth if hosts is None else hosts.between.bandwidth / hosts.per_host,
        card=None if hosts is None else hosts.between.bandwidth,
        processes=count,
        micro_batches=job.dp * job.micro_batches,
        ranks_per_host=per_host,
    )
    return [rival.against(proposal.step_ms) for rival in rivals]


def _planned(options: argparse.Namespace, constraints: Constraints, known: ModelLayers | None = None) -> _Planned:
    """Returns what is planned, of the best mesh. Raises: ConfigError, TraceError."""
    from fold3d.plan.search import decide, decide_jobs
    from fold3d.plan.space.mesh import Mesh, search_meshes
    from fold3d.trace.shadow import shared_shadows

    replicas = _replicas(options)
    with shared_shadows():  # of the model, which is the same for all meshes
        layers = _Layers(options, known)
        if replicas is not None:
            count = _config(options, options.tp, options.pp).micro_batches
            mesh = Mesh(tp=options.tp, pp=options.pp, dp=replicas, micro_batches=count)
            job = layers.job(mesh)
            proposal = decide(job, constraints, lambda: True, progress=_Teller([mesh]))
            return _Planned(job=job, proposal=proposal, layers=layers, options=options)

        def decided(jobs: list[TrainingJob]) -> list[Found]:
            told = [Mesh(tp=job.tp, pp=job.pp, dp=job.dp, micro_batches=job.micro_batches) for job in jobs]
            return decide_jobs(jobs, constraints, lambda: True, progress=_Teller(told))

        tried = search_meshes(_meshes(options, layers), layers.job, decided)
        table = _mesh_table(tried, layers)
        if tried[0].found is None:
            raise ConfigError(
                f"{table}\nno mesh of {options.world_size} processes is possible; the table says why. Change -w, --tp "
                "or --pp"
            )
        job, proposal = layers.job(tried[0].mesh), tried[0].found.proposal()
        return _Planned(job=job, proposal=proposal, layers=layers, options=options, tried=tried, tables=[table])


class _Teller:
    """Prints now and then how far a long search is, and the best so far: lines of standard error."""

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self._meshes = meshes
        self._said = time.monotonic()

    def __call__(self, job: int, state: PlanProgress) -> None:
        """Called by the search between its rounds."""
        from fold3d.plan.strategy import name_of

        if time.monotonic() - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = time.monotonic()
        best = "nothing fits yet"
        if job >= 0:
            name = name_of(state.best.segments, state.best.schedule, state.best.group_size or None, state.best.kind)
            best = f"best so far {state.best_ns / 1e6:.1f} ms a step, {self._meshes[job].name}: {name}"
        _say(f"{state.doing}: {state.simulated} plans simulated; {best}")


def _best_batch(options: argparse.Namespace, constraints: Constraints) -> _Planned:
    """Returns `_planned` of the size of micro-batches with the shortest step of those that fit, with a table of all.

    Raises: ConfigError when no size divides the samples.
    """
    from fold3d.plan.micro_batch_size import search_sizes, sizes_of

    planned: dict[int, _Planned] = {}
    replicas = _replicas(options)
    samples, rest = divmod(options.global_samples, replicas or 1)
    if rest or not samples:
        raise ConfigError(f"--global-samples={options.global_samples} cannot be divided by {replicas or 1} replicas")

    def plan(size: int) -> tuple[TrainingJob, Proposal]:
        if replicas is None:
            count = {"global_micro_batches": options.global_samples // size}
        else:
            count = {"micro_batches": options.global_samples // (size * replicas)}
        one = planned[size] = _planned(argparse.Namespace(**(vars(options) | count | {"batch": size})), constraints)
        return one.job, one.proposal

    found = search_sizes(sizes_of(samples, _MOST_SAMPLES), plan)
    lines = ["samples of a micro-batch  predicted step"]
    for one in found:
        needs = f"{text_of_bytes(one.proposal.memory_bytes)} on the fullest rank" + (
            "" if one.fits else ", does not fit"
        )
        count = one.proposal.strategy.micro_batches
        lines.append(f"{one.size:<24}  {one.proposal.step_ms:9.1f} ms  {count} micro-batches, {needs}")
    best = planned[found[0].size]
    return replace(best, tables=[*lines, *best.tables])


def _given(options: argparse.Namespace) -> Strategy:
    """Returns the strategy that is given, and sets what it says of the mesh. Raises: ConfigError for what contradicts
    it."""
    from fold3d.plan.space.registry import KNOBS
    from fold3d.plan.strategy import given

    found = given(options.strategy)
    mesh = {"pp": found.pp, "tp": found.tp, "micro_batches": found.micro_batches}
    mesh["world_size"] = found.dp * found.pp * found.tp
    for name, value in (mesh | dict.fromkeys(("global_micro_batches", "global_samples"))).items():
        mine = getattr(options, name)
        if mine is not None and mine != value and not (name in ("pp", "tp") and mine == 1):
            raise ConfigError(f"--{name.replace('_', '-')} is {mine}, and the strategy has {value}; leave it out")
    for knob in KNOBS:
        if getattr(options, knob.name) is not None:
            raise ConfigError(
                f"--{knob.name.replace('_', '-')} has no effect with --strategy, which says it; remove it"
            )
    decided = {"schedule": found.schedule, "segments": str(found.segments)} | dict(found.settings)
    vars(options).update(mesh | decided)
    return found


def _settle(options: argparse.Namespace) -> None:
    """Makes options complete. Raises: ConfigError for some that make no sense, or do not fit each other."""
    if options.dtype is None:
        options.dtype = model_option.dtype_of(options)
    cluster_option.settle(options)
    for name in ("tflops", "bandwidth", "copy_bandwidth", "batch", "world_size", "global_samples", "price"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it must be positive")
        if isinstance(value, float) and not _LEAST <= value <= 1 / _LEAST:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value:g}; it must be between {_LEAST:g} and {1 / _LEAST:g}"
            )
    if not 0 <= options.latency < 1e9:
        raise ConfigError(f"--latency is {options.latency:g}; it must not be negative, and below 1e9 (1,000 s)")
    if options.world_size >= 1 << 31:
        raise ConfigError(f"--world-size is {options.world_size}; it must be below {1 << 31}")
    free = options.tp is None or options.pp is None
    if not free and min(options.tp, options.pp) > 0 and options.world_size % (options.tp * options.pp):
        raise ConfigError(
            f"--world-size={options.world_size} is no multiple of --tp * --pp = {options.tp * options.pp}; change one "
            "of them"
        )
    counts = {name: getattr(options, name) for name in ("batch", "micro_batches", "global_micro_batches")}
    said = [name for name, value in counts.items() if value is not None]
    if options.global_samples is not None and said:
        raise ConfigError(f"--{said[0].replace('_', '-')} is chosen where --global-samples is given; leave one out")
    counted = options.global_samples is not None  # the number of micro-batches follows
    if not counted and free and (options.micro_batches is not None or (options.global_micro_batches or 0) < 1):
        raise ConfigError(
            "with --tp auto or --pp auto, --micro-batches depends on how many replicas there will be: give "
            "--global-micro-batches, a positive number, instead"
        )
    if not free and options.global_micro_batches is not None:
        raise ConfigError(
            f"--global-micro-batches={options.global_micro_batches} is for --tp auto or --pp auto; "
            "with both given, --micro-batches says how many a replica runs"
        )
    _check_late(options)
    if options.ranks_per_host is not None and options.ranks_per_host < 1:
        raise ConfigError(f"--ranks-per-host is {options.ranks_per_host}; a host has at least one")


def _check_late(options: argparse.Namespace) -> None:
    """Raises: ConfigError for settings of late gradients that do not go together."""
    from fold3d.plan.space.offload import OPTIMIZER

    if options.gradient_delay != "1":
        for name in (
            name for name in ("no_flush", "delay_correction") if getattr(options, name) not in (False, "none")
        ):
            raise ConfigError(f"--{name.replace('_', '-')} needs late gradients; set --gradient-delay 1")
    if options.no_flush and options.tp != 1:
        raise ConfigError("--no-flush is not available with --tp; leave it out")
    if options.no_flush and options.pp == 1:
        raise ConfigError("--no-flush has no effect with --pp 1, where there is no pipeline; leave it out")
    on_host = options.offload_optimizer is not None and OPTIMIZER.read(options.offload_optimizer)
    on_device = {"--no-flush": options.no_flush, "--delay-correction predict": options.delay_correction == "predict"}
    for name, is_said in on_device.items():
        if is_said and on_host:
            raise ConfigError(f"{name} is not available with --offload-optimizer True; leave one of them out")
    if options.no_flush and options.delay_correction == "predict":
        raise ConfigError("--delay-correction predict is not available with --no-flush; leave one of them out")


def _config(options: argparse.Namespace, tp: int, pp: int, micro_batches: int | None = None) -> ParallelConfig:
    count = options.micro_batches if micro_batches is None else micro_batches
    return ParallelConfig(
        tp=tp, pp=pp, micro_batches=_MICRO_BATCHES if count is None else count, memory_limit=options.memory_limit
    )


def _replicas(options: argparse.Namespace) -> int | None:
    """Returns how many replicas there are; None where the mesh is open. Raises: ConfigError for one that cannot be."""
    if options.tp is None or options.pp is None:
        return None
    return _config(options, options.tp, options.pp).resolve_dp(options.world_size)


def _meshes(options: argparse.Namespace, layers: _Layers) -> list[Mesh]:
    from fold3d.plan.layout import places
    from fold3d.plan.space.mesh import meshes

    found = meshes(
        options.world_size,
        options.global_micro_batches,
        tp=options.tp,
        pp=options.pp,
        ranks_per_host=options.ranks_per_host or _RANKS_PER_HOST,
        most_stages=len(places(layers.trace)),
    )
    return [mesh for mesh in found if mesh.pp > 1] if options.no_flush else found  # else there is no pipeline


def _mesh_table(tried: Sequence[Tried[Mesh]], layers: _Layers) -> str:
    """Returns what was tried, the best first."""
    shown = tried[:_MESHES_SHOWN]
    width = max(len(one.mesh.name) for one in shown)
    lines = [f"{'mesh':<{width}}  predicted step, memory of the fullest process, waiting for the network"]
    for one in shown:
        if one.found is None or one.step_ms is None:
            lines.append(f"{one.mesh.name:<{width}}  {one.reason.splitlines()[0]}")
            continue
        exposed = _exposed_ms(one.found.proposal())
        speed = layers.speed(one.step_ms, one.mesh.dp * one.mesh.micro_batches).words()
        needs = f"{one.step_ms:9.1f} ms  {text_of_bytes(one.found.memory_bytes)}  {exposed:.1f} ms  {speed}"
        lines.append(f"{one.mesh.name:<{width}}  {needs}" + (f", {one.reason}" if one.reason else ""))
    if len(tried) > len(shown):
        lines.append(f"{len(tried) - len(shown)} more are slower, or cannot be")
    return "\n".join(lines)


class _Layers:
    """What the model's layers cost, whole and in parts, on one kind of cluster."""

    def __init__(self, options: argparse.Namespace, known: ModelLayers | None = None) -> None:
        """Args:
        known: of the same model and micro-batch.
        """
        self._options = options
        self._link = cluster_option.link_of(options, has_tp=options.tp != 1)
        self._layers = known or _recorded(options)
        self.example, self.trace = self._layers.example, self._layers.trace
        self.whole = self._layers.profile(options.tflops * 1e12)

    @property
    def known(self) -> ModelLayers:
        """For another cluster."""
        return self._layers

    def job(self, mesh: Mesh) -> TrainingJob:
        """Returns what the planner is told. Raises: ConfigError when the model cannot be shared out so."""
        from fold3d.plan.job import HostLink, Hosts
        from fold3d.schedule import style_of

        options = self._options
        config = _config(options, mesh.tp, mesh.pp, mesh.micro_batches)
        more: dict[str, Any] = {}
        hosts = options.placement
        if hosts is None:  # links are said per process
            latency, bandwidth = options.latency / 1e6, options.bandwidth * 1e9 / 8
            hosts = Hosts(per_host=1, between=HostLink(bandwidth, latency), within=HostLink(bandwidth, latency))
            more = {"network": replace(hosts.network(options.world_size, 1), **self._link)}
        return self._layers.job(
            mesh,
            options.tflops * 1e12,
            hosts,
            sequence_parallel=bool(config.sequence_parallel),
            style=style_of(options.schedule or AUTO),
            memory_limit=config.memory_size,
            pool_limit=options.pool_limit,
            copy_bandwidth=options.copy_bandwidth * 1e9,
            flush=not options.no_flush,
            delay_correction=options.delay_correction,
            stage_times=_stage_times(mesh, options.slowness),
            **more,
        )

    @property
    def tokens(self) -> int | None:
        """Of a sample; None for models without."""
        ids = self.example.get("input_ids")
        return None if ids is None else int(ids.shape[1])

    def speed(self, step_ms: float, micro_batches: int) -> _Speed:
        """Returns what a step comes to.

        Args:
            micro_batches: of a step, all replicas together.
        """
        options, trace = self._options, self.trace
        ids = self.example.get("input_ids")
        seconds, count = step_ms / 1e3, options.world_size
        forward = sum(cost.flops for cost in (trace.prologue_cost, *trace.costs, trace.epilogue_cost))
        peak = options.tflops * 1e12 if options.peak is None else options.peak
        tokens = None if ids is None else micro_batches * ids.numel() / seconds
        cost = None
        if options.price is not None and tokens:
            cost = options.price * count / 3600 * _OF_COST / tokens
        return _Speed(
            tokens_per_second=tokens,
            utilisation=3 * forward * micro_batches / (seconds * count * peak),  # a backward is two forwards
            of_flops=peak,
            is_peak=options.peak is not None,
            cost=cost,
        )


def _stage_times(mesh: Mesh, slowness: Sequence[float]) -> tuple[float, ...]:
    """Returns how long the stages take, relative to the fastest rank: the slowest of a stage's ranks holds it up.

    Args:
        slowness: of every rank; empty: all are alike.
    """
    if not slowness:
        return ()
    places = [
        [
            slowness[(replica * mesh.pp + stage) * mesh.tp + shard]
            for replica in range(mesh.dp)
            for shard in range(mesh.tp)
        ]
        for stage in range(mesh.pp)
    ]
    return tuple(map(max, places))


def _recorded(options: argparse.Namespace) -> ModelLayers:
    """Returns the model's layers, and prints what it is."""
    import torch

    from fold3d.cli.model_option import ModelLayers

    model, example = model_option.load(options)
    if options.dtype is not None:
        model = model.to(getattr(torch, options.dtype))
    if example is None:
        raise ConfigError(f"{options.model!r} returns no example batch, and none can be made up; return (model, batch)")
    made = _resized(model, example, options)
    if not options.json:
        shapes = model_option.shapes_of(made)
        print(f"{model_option.describe(model)}; a micro-batch: {shapes}; {cluster_option.words_of(options)}")
    return ModelLayers(
        model,
        made,
        blocks=options.blocks,
        partition=options.partition,
        chunks=(options.pp or 1) * int(options.segments or 1),
        recompute=options.recompute or "none",
        measure=options.measure,
        tell=_say,
    )


def _resized(model: nn.Module, example: Mapping[str, Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the example with as many samples and tokens as the options say."""
    import torch

    from fold3d.trace.batches import most_tokens

    tokens = options.tokens
    if tokens is not None and (tokens < 1 or not set(example) <= {"input_ids", "decoder_input_ids"}):
        raise ConfigError(f"--tokens={tokens} takes a positive number and a model whose input is input_ids")
    most = most_tokens(model) if tokens is not None and model_option.is_config(options) else None
    if tokens is not None and most is not None and tokens > most:
        raise ConfigError(f"--tokens={tokens}: the model takes {most} at most; its configuration says how many")
    if tokens is None and model_option.is_config(options) and set(example) == {"input_ids"}:
        tokens = min(_MOST_TOKENS, most_tokens(model) or example["input_ids"].shape[1])
    made: dict[str, Any] = {}
    for name, value in example.items():
        if tokens is not None:
            value = value[:, :1].expand(-1, tokens)
        if value.is_floating_point() and options.dtype is not None:
            value = value.to(getattr(torch, options.dtype))
        made[name] = value[:1].expand(options.batch, *value.shape[1:]) if value.dim() else value
    return made
