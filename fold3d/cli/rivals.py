"""What a plan is compared with: DDP and HSDP; and with `fold3d plan --planner` what PipeDream, PipeDream-2BW or PTD-P
would choose.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fold3d.cli import model_option
from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.plan.costs import Profile
    from fold3d.plan.job import TrainingJob

PLANNERS = ("pipedream", "2bw", "ptd-p")


def lines(planner: str, options: argparse.Namespace, job: TrainingJob, whole: Profile) -> list[str]:
    """Returns what a planner chooses for the job's processes, a line each.

    Args:
        planner: one of PLANNERS.
        job: of fold3d's plan: its model, its links, and the samples of a step.
        whole: costs of the layers with no weight shared out, of micro-batches of `options.batch` samples.
    """
    return {"pipedream": _pipedream, "2bw": _two_bw, "ptd-p": _ptd_p}[planner](options, job, whole)


def _per_host(options: argparse.Namespace) -> int:
    per_host = options.ranks_per_host or options.world_size
    if options.world_size % min(per_host, options.world_size):
        raise ConfigError(
            f"--planner needs hosts that are alike: {options.world_size} processes are no multiple of --ranks-per-host "
            f"{per_host}"
        )
    return int(min(per_host, options.world_size))


def _samples(options: argparse.Namespace, job: TrainingJob) -> tuple[int, int]:
    """Returns the samples of a micro-batch, and of a step."""
    micro_batches = job.dp * job.micro_batches
    size = options.batch or (1 if options.global_samples is None else options.global_samples // micro_batches)
    return size, size * micro_batches


def _pipedream(options: argparse.Namespace, job: TrainingJob, whole: Profile) -> list[str]:
    from fold3d.placement.layers import chunk_layers
    from fold3d.rivals import COSTS, LayerRow, Level, pipedream

    blocks = len(job.trace.blocks)
    weights = [0] * blocks
    for layer in chunk_layers(job.trace, [(0, blocks)], 1)[0]:
        block = min(max(layer.block, 0), blocks - 1)  # what runs around the blocks stays with the first and the last
        weights[block] += sum(whole.gradient_bytes[name] for name in layer.parameters)
    seconds = [forward + backward for forward, backward in zip(whole.forward, whole.backward, strict=True)]
    seconds[1] += seconds[0]
    seconds[-2] += seconds[-1]
    row = LayerRow(
        names=tuple(job.trace.blocks),
        seconds=tuple(seconds[1:-1]),
        sent_bytes=tuple(map(float, whole.activation_bytes)),
        parameter_bytes=tuple(map(float, weights)),
    )
    per_host = _per_host(options)
    levels = [Level(per_host, job.network.tp_bandwidth)] if per_host > 1 else []
    if per_host < options.world_size:
        levels.append(Level(options.world_size // per_host, job.network.bandwidth))
    found = []
    for cost in COSTS:
        plan = pipedream(row, levels or [Level(1, job.network.bandwidth)], cost)
        stages = ", ".join(f"{stage.first}-{stage.end} on {stage.replicas}" for stage in plan.stages)
        found.append(
            f"PipeDream (all-reduce as {cost}): {plan.name}, blocks {stages}; a micro-batch every "
            f"{1e3 * plan.seconds:.1f} ms without a flush; the first stage keeps {plan.warm_up[0] + 1} versions of its "
            "weights"
        )
    return found


def _two_bw(options: argparse.Namespace, job: TrainingJob, whole: Profile) -> list[str]:
    from fold3d.rivals import EqualBlocks, two_bw

    size, batch = _samples(options, job)
    seconds = sum(whole.forward) + sum(whole.backward)
    gradients, weights = sum(whole.gradient_bytes.values()), sum(whole.parameter_bytes.values())
    model = EqualBlocks(
        blocks=len(job.trace.blocks),
        seconds=lambda b: seconds * b / size,
        weight_bytes=weights,
        state_bytes=round(gradients * (1 + whole.optimizer_bytes)),
        activation_bytes=sum(layer.saved for layer in whole.layers) // size,
        border_bytes=max(whole.activation_bytes) // size,
    )
    plan = two_bw(
        model,
        workers=options.world_size,
        batch=batch,
        memory_bytes=math.inf if job.memory_limit is None else job.memory_limit,
        workers_per_host=_per_host(options),
        within=job.network.tp_bandwidth,
        across=job.network.bandwidth,
    )
    again = ", recomputing" if plan.recompute else ""
    return [
        f"PipeDream-2BW: {plan.d} pipelines of {plan.p} stages, {plan.b} samples a micro-batch, {plan.accumulation} "
        f"between updates{again}; {plan.samples_per_second:.1f} samples a second without a flush, "
        f"{text_of_bytes(round(plan.memory_bytes))} a worker"
    ]


def _ptd_p(options: argparse.Namespace, job: TrainingJob, whole: Profile) -> list[str]:
    from fold3d.rivals import Transformer, ptd_p

    config = getattr(model_option.load(options)[0], "config", None)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    found = [getattr(config, name, None) for name in names]
    layers, hidden, heads, vocabulary = (value if isinstance(value, int) else 0 for value in found)
    if 0 in (layers, hidden, heads, vocabulary):
        raise ConfigError(f"--planner ptd-p knows models whose configuration has {', '.join(names)}; leave it out")
    size, batch = _samples(options, job)
    seconds = sum(whole.forward) + sum(whole.backward)
    plan = ptd_p(
        Transformer(layers=layers, hidden=hidden, heads=heads, sequence=options.tokens or 1, vocabulary=vocabulary),
        gpus=options.world_size,
        gpus_per_host=_per_host(options),
        memory_bytes=math.inf if job.memory_limit is None else job.memory_limit,
        batch=batch,
        seconds=lambda b: seconds * b / size,
    )
    return [
        f"PTD-P: t={plan.t} p={plan.p} d={plan.d}, {plan.b} samples a micro-batch, blocks recomputed; "
        f"{text_of_bytes(round(plan.memory_bytes))} a GPU by its formulas"
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """DDP or HSDP which accumulates its micro-batches and reduces in the backward of the last; milliseconds of a step.

    What stays inside of a host is free of charge, and nothing costs more than its bytes: a bound that favours it.
    """

    name: str
    compute_ms: float
    """With the optimizer's update."""
    window_ms: float
    """The backward that its sum can hide beneath."""
    sum_ms: float
    """Of all gradients, between hosts."""

    @property
    def exposed_ms(self) -> float:
        """What of the sum is not hidden."""
        return max(0.0, self.sum_ms - self.window_ms)

    @property
    def step_ms(self) -> float:
        """Of the whole step."""
        return self.compute_ms + self.exposed_ms

    def against(self, step_ms: float) -> str:
        """Returns a sentence: how a plan of `step_ms` compares, and from which time of the sum on it is ahead."""
        even = max(0.0, step_ms - self.compute_ms + self.window_ms)
        verdict = "" if step_ms < self.step_ms else f": take {self.name} if the model fits"
        return (
            f"{self.name} takes at least {self.step_ms:.1f} ms = compute {self.compute_ms:.1f} + exposed sums "
            f"{self.exposed_ms:.1f}; this plan takes {step_ms / self.step_ms:.2f} of that{verdict}. "
            f"It is ahead where the sums take more than {even:.1f} ms (here {self.sum_ms:.1f})"
        )


def rivals_of(
    whole: Profile,
    *,
    bandwidth: float,
    processes: int,
    micro_batches: int,
    ranks_per_host: int | None,
    card: float | None = None,
) -> tuple[Rival, ...]:
    """Returns DDP and, where the hosts are known and several, HSDP.

    Args:
        whole: costs of the model with no weight shared out.
        bandwidth: bytes per second that a process sends to other hosts, while all do.
        card: those of a host, which DDP's ring passes once; None: nobody knows more than `bandwidth`.
        micro_batches: of a step, all together.
        ranks_per_host: that HSDP shards between; None: nobody knows.
    """
    gradients = sum(whole.gradient_bytes.values())
    share = micro_batches / processes
    forward, backward = 1e3 * sum(whole.forward), 1e3 * sum(whole.backward)
    names = {"DDP": 1} | ({"HSDP": ranks_per_host} if ranks_per_host and ranks_per_host > 1 else {})
    found = []
    for name, shards in names.items():
        hosts = processes / shards
        if hosts > 1:
            sent = 2 * (hosts - 1) / hosts * gradients / shards
            found.append(
                Rival(
                    name=name,
                    compute_ms=share * (forward + backward) + 1e3 * whole.update_seconds * gradients / shards,
                    window_ms=min(1.0, share) * backward,
                    sum_ms=1e3 * sent / (card if card is not None and shards == 1 else bandwidth),
                )
            )
    return tuple(found)
