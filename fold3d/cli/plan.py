"""`fold3d plan`: how a model would be trained on so many processes, and what a step would take."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fold3d.cli import breakdown, memory, model_option, tp_option
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from fold3d.plan.job import Job


def add(subcommands: Any, *, knobs: bool) -> None:
    """Adds the subcommand to the parser; its `knobs` only where they are asked for: their registry loads torch."""
    made = subcommands.add_parser("plan", help="plan the training of a model on a cluster", description=__doc__)
    model_option.add(made)
    made.add_argument("-w", "--world-size", type=int, required=True, metavar="N", help="processes, one per device")
    made.add_argument("-p", "--pp", type=int, default=1, help="stages, default 1; the rest are replicas")
    made.add_argument("-t", "--tp", type=int, default=1, help="that share each weight of a stage, default 1")
    made.add_argument("-m", "--micro-batches", type=int, default=8, metavar="M", help="per step, default 8")
    made.add_argument("--batch", type=int, default=1, metavar="N", help="samples of a micro-batch, default 1")
    made.add_argument("--tokens", type=int, metavar="N", help="of a sample, default 128; models with input_ids")
    made.add_argument("--memory-limit", metavar="SIZE", help="of a process, such as 24GB; default: any")
    costs = made.add_argument_group("cluster")
    costs.add_argument("--tflops", type=float, default=50.0, metavar="T", help="that a device sustains, default 50")
    costs.add_argument("--measure", action="store_true", help="time the layers on this machine instead")
    costs.add_argument(
        "--bandwidth", type=float, default=10.0, metavar="GBIT", help="per process, each way; default 10"
    )
    costs.add_argument("--latency", type=float, default=50.0, metavar="US", help="of a message, default 50")
    tp_option.add(costs)
    made.set_defaults(run=run)
    if knobs:
        from fold3d.plan.space.registry import KNOBS

        fixed = made.add_argument_group("what is fixed; the rest is chosen")
        for knob in KNOBS:
            names = {f"--{knob.name.replace('_', '-')}": None, f"--{knob.name}": None}  # as here, and as in the Trainer
            fixed.add_argument(*names, dest=knob.name, metavar="VALUE", help=knob.help)


def run(options: argparse.Namespace) -> None:
    """Prints the planner's table, the strategy as text and the breakdown of a step. Raises: ConfigError, TraceError."""
    from fold3d.plan.memory.changes import predicted_curves
    from fold3d.plan.search import decide
    from fold3d.plan.space.registry import KNOBS, constrained

    given = {knob: getattr(options, knob.name) for knob in KNOBS}
    constraints = constrained(**{k.name: k.read(text) for k, text in given.items() if text is not None})
    job = _job(options)
    proposal = decide(job, constraints, lambda: True)
    if job.memory_limit is not None and proposal.memory_bytes > job.memory_limit:
        raise ConfigError(f"{proposal.table}\nnothing fits: raise --memory-limit or --pp, or set --recompute full")
    print(proposal.table)
    print(f"strategy: {proposal.strategy}")
    print(breakdown.table("stage", proposal.prediction))
    print(memory.table(predicted_curves(job, proposal.strategy)))


def _job(options: argparse.Namespace) -> Job:
    from fold3d.config import ParallelConfig
    from fold3d.device import default_device
    from fold3d.plan.costs import ACTION_SECONDS, BUCKET_SECONDS, NetworkCosts
    from fold3d.plan.job import Job
    from fold3d.plan.space.recompute import KNOB as RECOMPUTE
    from fold3d.profile.assumed import assumed_profile
    from fold3d.profile.layers import profile_model
    from fold3d.profile.shard import of_a_shard
    from fold3d.profile.tp_sync import halves_factor, with_tp_sync
    from fold3d.splitting.plan_sharding import plan_sharding
    from fold3d.trace import trace

    for name in ("tflops", "bandwidth", "batch", "world_size"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name):g}; it must be positive")
    if not 0 <= options.latency < 1e9:
        raise ConfigError(f"--latency is {options.latency:g}; it must not be negative, and below 1e9 (1,000 s)")
    if options.world_size >= 1 << 31:
        raise ConfigError(f"--world-size is {options.world_size}; it must be below {1 << 31}")
    sizes = {"tp": options.tp, "pp": options.pp, "micro_batches": options.micro_batches}
    config = ParallelConfig(**sizes, memory_limit=options.memory_limit)
    link = tp_option.link_of(options, has_tp=options.tp > 1)
    dp = config.resolve_dp(options.world_size)
    model, example = model_option.load(options)
    if example is None:
        raise ConfigError(f"{options.model!r} returns no example batch, and none can be made up; return (model, batch)")
    example = _resized(example, options)
    traced = trace(model, blocks=options.blocks, example=example)
    recompute = options.recompute is not None and not RECOMPUTE.read(options.recompute).nothing
    print(f"{model_option.describe(model)}; a micro-batch: {model_option.shapes_of(example)}")
    if options.measure:
        profile = profile_model(model, traced, example, default_device(), recompute=recompute)
    else:
        speed = options.tflops * 1e12
        profile = assumed_profile(model, traced, example, flops_per_second=speed, recompute=recompute)
    if options.tp > 1:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        sharding = plan_sharding(model, traced, example, options.tp, sequence_parallel=bool(config.sequence_parallel))
        profile = with_tp_sync(of_a_shard(profile, traced, sharding, shapes), model, traced, sharding, example)
        if options.measure:
            profile = replace(profile, halves_factor=halves_factor(model, traced, example, default_device()))
    latency, bandwidth = options.latency / 1e6, options.bandwidth * 1e9 / 8
    return Job(
        trace=traced,
        profile=profile,
        network=NetworkCosts(
            pp_latency=latency, pp_bandwidth=bandwidth, dp_bandwidth=bandwidth, hop_latency=latency, **link
        ),
        dp=dp,
        tp=options.tp,
        pp=options.pp,
        micro_batches=options.micro_batches,
        memory_limit=config.memory_size,
        action_seconds=ACTION_SECONDS,
        bucket_seconds=BUCKET_SECONDS,
    )


def _resized(example: Mapping[str, Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the example with as many samples and tokens as the options say."""
    if options.tokens is not None and (options.tokens < 1 or set(example) != {"input_ids"}):
        raise ConfigError(f"--tokens={options.tokens} takes a positive number and a model whose input is input_ids")
    made: dict[str, Any] = {}
    for name, value in example.items():
        if options.tokens is not None:
            value = value[:, :1].expand(-1, options.tokens)
        made[name] = value[:1].expand(options.batch, *value.shape[1:]) if value.dim() else value
    return made
