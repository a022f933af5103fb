"""`fold3d simulate`: what a training step would take on a cluster, and where its time would go."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fold3d.cli import cluster_option
from fold3d.cli.schedules import add_schedule, picture, recompute_of, schedule_of, title_of
from fold3d.cli.tables import breakdown_table, memory_table
from fold3d.config import DP_SYNC_DTYPES, SIMULATED_DP_SYNC
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.plan.memory import StageMemory
    from fold3d.plan.simulator import Prediction
    from fold3d.schedule import Schedule

_MOST = 1e9
"""Of a number on the command line: bytes and nanoseconds of it can be counted."""


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    command = subcommands.add_parser("simulate", help="predict a training step on a cluster", description=__doc__)
    add_schedule(command)
    work = command.add_argument_group("work of one stage, all its segments together")
    of_work = partial(work.add_argument, type=float)
    of_work("--forward", default=10.0, metavar="MS", help="forward time of a micro-batch; default 10")
    of_work("--backward", metavar="MS", help="backward time of a micro-batch; default 2 x --forward")
    work.add_argument("--layers", type=int, metavar="N", help="number of layers; default 2 per segment")
    of_work(
        "--activation", default=1.0, metavar="MB", help="activation sent to the next stage per micro-batch; default 1"
    )
    of_work("--gradients", default=100.0, metavar="MB", help="gradients of a stage; default 100")
    of_work(
        "--saved",
        metavar="MB",
        help="memory kept per micro-batch from forward to backward; prints the memory of a step (AdamW, fp32)",
    )
    work.add_argument(
        "--tp",
        type=int,
        default=1,
        help="tensor-parallel ranks; each layer has two all-reduces of --activation, each way",
    )
    cluster = command.add_argument_group("cluster")
    of_cluster = partial(cluster.add_argument, type=float)
    cluster_option.add_tp_link(cluster)
    cluster.add_argument(
        "--tp-overlap", metavar="WAY", help="how tensor-parallel sums are hidden: sub, none or auto; default auto"
    )
    cluster.add_argument("--dp", type=int, default=2, help="replicas; default 2")
    of_cluster("--bandwidth", default=10.0, metavar="GBIT", help="bandwidth per host, each way; default 10")
    of_cluster("--latency", default=50.0, metavar="US", help="latency of a message; default 50")
    cluster.add_argument(
        "--ranks-per-host", type=int, default=1, metavar="N", help="ranks that share a network card; default 1"
    )
    of_cluster("--chunk", default=1.0, metavar="MB", help="slice of DP.sync, after which it can pause; default 1")
    of_cluster(
        "--copy-bandwidth", default=25.0, metavar="GB", help="GB/s between device and pool, each way; default 25"
    )
    cluster.add_argument(
        "--no-preempt", action="store_true", help="do not pause DP.sync: PP.sync waits for whole buckets"
    )
    command.add_argument(
        "--dp-sync", choices=SIMULATED_DP_SYNC, default="zero1", help="how DP.sync is hidden; default zero1"
    )
    command.add_argument(
        "--dp-sync-dtype",
        choices=DP_SYNC_DTYPES,
        default="float32",
        help="dtype in which gradients are sent; default float32",
    )
    command.add_argument(
        "--gradient-delay",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: apply gradients one step later, so that DP.sync has a full step; default 0",
    )
    command.add_argument(
        "--no-flush",
        action="store_true",
        help="do not drain the pipeline between steps (PipeDream-2BW); with 1f1b and --gradient-delay 1",
    )
    command.add_argument(
        "--bucket", type=float, metavar="MB", help="least gradients per bucket; default: one bucket per layer"
    )
    command.add_argument(
        "--recompute", metavar="CHUNKS", help="chunks to recompute: full, or one word per chunk, such as full/none"
    )
    command.add_argument(
        "--offload",
        default="none",
        metavar="WHAT",
        help="activations to offload, with --saved: boundaries (inputs of recomputed chunks), activations (all), or "
        "activations:50%% (of half of the micro-batches)",
    )
    command.add_argument(
        *("--picture", "--png"),
        dest="picture",
        type=picture,
        metavar="FILE",
        help="draw the step's timeline: .png, .svg or .pdf",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the breakdown of the simulated step. Raises: ConfigError for values that do not fit each other."""
    from fold3d import schedule as schedules
    from fold3d.offload import Offload
    from fold3d.plan.cluster_model import ClusterCosts, Work
    from fold3d.plan.costs import NetworkCosts, TpExchange
    from fold3d.plan.memory import Spared, even_curves, even_stashes
    from fold3d.plan.simulator import predict
    from fold3d.plan.space.dp_sync import gradient_share
    from fold3d.plan.space.tp_overlap import even_regions, layers_seconds
    from fold3d.recompute import Choice, Recompute

    if options.picture and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--picture needs matplotlib, which is not installed: pip install matplotlib")
    _check_sizes(options)
    schedule = schedule_of(options, "simulate")
    schedules.validate(schedule)
    again = recompute_of(options, schedule)
    if options.saved is not None and not options.saved >= 0:
        raise ConfigError(f"--saved is {options.saved:g}; it cannot be negative")
    leaves = Offload.parse(options.offload)
    if not leaves.nothing and options.saved is None:
        raise ConfigError(f"--offload {options.offload} copies what --saved says; give it, in MB")
    whole = Recompute(tuple(Choice(full=chunk) for chunk in again))
    moves = Spared(whole, leaves).offloaded(len(again))
    if not leaves.nothing and not moves:
        raise ConfigError(f"--offload {leaves} has no effect: no chunk recomputes; set --recompute full")
    kept = schedule  # as many stashes as without a flush
    if options.no_flush:
        schedule = _without_flush(options, schedule, others=options.recompute is not None or bool(moves))
    if options.recompute is not None or moves:
        kept = schedule = schedules.lower(
            schedule, reduce=True, recompute=again, offload=moves, offload_share=leaves.share
        )
    layers = 2 * schedule.segments if options.layers is None else options.layers
    if options.tp < 1:
        raise ConfigError(f"--tp is {options.tp}; it must be positive")
    link, overlap = cluster_option.link_of(options, has_tp=options.tp > 1), cluster_option.overlap_of(options)
    network = NetworkCosts(pp_latency=0.0, pp_bandwidth=1.0, dp_bandwidth=1.0, hop_latency=0.0, **link)
    sums = [TpExchange(round(options.activation * 1e6))] * 2

    def waits(milliseconds: float) -> float:
        if options.tp == 1 or layers < 1:
            return 0.0
        regions = even_regions(milliseconds / 1e3 / layers, sums, options.tp, network)
        return max(0.0, layers_seconds(layers, regions, overlap) - milliseconds / 1e3)

    forward = _positive(options, "forward")
    backward = 2 * forward if options.backward is None else _positive(options, "backward")
    forward_tp, backward_tp = waits(forward), waits(backward)
    work = Work.even(
        schedule,
        forward=forward / 1e3 + forward_tp,
        backward=backward / 1e3 + backward_tp,
        forward_tp=forward_tp,
        backward_tp=backward_tp,
        layers=layers,
        activation_bytes=round(options.activation * 1e6),
        gradient_bytes=round(options.gradients * 1e6),
    )
    saved = 0 if options.saved is None else round(options.saved * 1e6)
    if moves:
        work = replace(work, stash_bytes=even_stashes(work, schedule.pp, saved, again))
    cluster = ClusterCosts(
        dp=options.dp,
        bandwidth=options.bandwidth * 1e9 / 8,
        latency=options.latency / 1e6,
        ranks_per_host=options.ranks_per_host,
        slice_bytes=round(options.chunk * 1e6),
        preempt=not options.no_preempt,
        copy_bandwidth=_positive(options, "copy_bandwidth") * 1e9,
        copies_share=True,
        gradient_share=gradient_share(options.dp_sync_dtype),
        gradient_delay=options.gradient_delay,
    )
    prediction = predict(
        schedule,
        work,
        cluster,
        dp_sync=options.dp_sync,
        bucket_bytes=None if options.bucket is None else round(options.bucket * 1e6),
        timeline=bool(options.picture),
    )
    curves: Sequence[StageMemory] = ()
    if options.saved is not None:
        curves = even_curves(kept, work, cluster, saved, dp_sync=options.dp_sync, versions=1 + options.no_flush)
    _show(options, schedule, prediction, curves)


def _show(
    options: argparse.Namespace, schedule: Schedule, prediction: Prediction, curves: Sequence[StageMemory]
) -> None:
    if options.json:
        print(json.dumps(_to_dict(schedule, prediction, curves), indent=2))
    else:
        print(_report(schedule, prediction))
        if curves:
            print(memory_table(curves))
    if options.picture:
        from fold3d.observe.timeline_picture import write_picture

        title = f"{title_of(options)}, {options.dp_sync}: simulated"
        write_picture(options.picture, prediction.records, pp=schedule.pp, title=title, simulated=prediction.ranks)
        if not options.json:
            print(options.picture)


def _without_flush(options: argparse.Namespace, schedule: Schedule, *, others: bool) -> Schedule:
    """Returns what the ranks run of each step. Raises: ConfigError for what does not go without a flush."""
    from fold3d import schedule as schedules

    if options.gradient_delay != 1:
        raise ConfigError("--no-flush needs late gradients; set --gradient-delay 1")
    if options.schedule != "1f1b" or others:
        raise ConfigError("--no-flush is for schedule 1f1b, without --recompute and --offload; leave them out")
    return schedules.without_flush("1f1b", pp=schedule.pp, micro_batches=schedule.micro_batches)[1]


def _check_sizes(options: argparse.Namespace) -> None:
    """Raises: ConfigError for numbers whose bytes or nanoseconds could not be counted."""
    for name, value in vars(options).items():
        if isinstance(value, float) and not abs(value) <= _MOST:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it must be a number up to {_MOST:g}")


def _positive(options: argparse.Namespace, name: str) -> float:
    value: float = getattr(options, name)
    if not value > 0:
        raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it must be positive")
    return value


def _to_dict(schedule: Schedule, prediction: Prediction, curves: Sequence[StageMemory]) -> dict[str, Any]:
    """Returns what --json prints: times in milliseconds, memory in bytes."""
    made = asdict(replace(prediction, records=()))
    del made["records"]
    ranks = made.pop("ranks")
    sizes = {"pp": schedule.pp, "segments": schedule.segments, "micro_batches": schedule.micro_batches}
    memory = [curve.peak.device for curve in curves] if curves else None
    return {**sizes, **made, f"{_who(schedule, prediction)}s": ranks, "peak_bytes": memory}


def _who(schedule: Schedule, prediction: Prediction) -> str:
    """Returns what a row of the breakdown is of: where hosts hold parts of several replicas, a rank."""
    return "stage" if len(prediction.ranks) == schedule.pp else "rank"


def _report(schedule: Schedule, prediction: Prediction) -> str:
    over = 100 * (prediction.step_ms / prediction.limit_ms - 1)
    lines = [
        f"pp={schedule.pp} segments={schedule.segments} m={schedule.micro_batches}: step {prediction.step_ms:.2f} ms, "
        f"{over:.1f} % over the limit max(compute + bubble, network) of {prediction.limit_ms:.2f} ms"
    ]
    if prediction.early_gathers is not None:
        lines.append(f"gathers begun before the last reduce-scatter: {prediction.early_gathers} per stage")
        lines.append(f"order of gathers on stage 0, by bucket: {' '.join(map(str, prediction.gather_order[0]))}")
    lines.append(
        f"DP.sync paused for PP.sync {prediction.preemptions} times in {prediction.steps} steps; "
        f"PP.sync waited at most {prediction.longest_pp_wait_ms:.3f} ms"
    )
    if not prediction.steady:
        lines.append("the steps did not settle: this is the last of them")
    return "\n".join([*lines, breakdown_table(_who(schedule, prediction), prediction)])
