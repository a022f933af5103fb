"""PipeDream-2BW's planner (Narayanan et al. 2021, algorithm 1): equal stages, all replicated alike, by closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fold3d.errors import ConfigError

_AGAIN = 4 / 3
"""c_extra: what recomputation makes of a forward and a backward that takes twice as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualBlocks:
    """A model of blocks that all cost the same, as the closed forms of section 3.3 see it."""

    blocks: int
    seconds: Callable[[int], float]
    """Samples of a micro-batch -> seconds of the whole model's forward and backward."""
    weight_bytes: int
    """Of one version of all weights; gradients that are summed are as large."""
    state_bytes: int
    """Of gradients and optimizer state, of which there is one version."""
    activation_bytes: int
    """That the whole model keeps of a sample."""
    border_bytes: int
    """What a block hands to the next one of a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoBwPlan:
    """How PipeDream-2BW would train."""

    d: int
    """Pipelines."""
    p: int
    """Stages."""
    b: int
    """Samples of a micro-batch."""
    recompute: bool
    accumulation: int
    """m: micro-batches between two updates, of each pipeline. As printed, g = B / (N b) is m / p."""
    samples_per_second: float
    memory_bytes: float
    """Of a worker."""


def two_bw(
    model: EqualBlocks,
    *,
    workers: int,
    batch: int,
    memory_bytes: float,
    workers_per_host: int,
    within: float,
    across: float,
) -> TwoBwPlan:
    """Returns the configuration with the highest throughput of all (d, p) with d p <= workers that fit.

    For each, three executions: without pipelining (p = 1 only, one version of the weights); with it, two versions; with
    recomputation besides. The micro-batch is the largest that fits and divides what a pipeline gets of the batch, with
    at least p micro-batches between updates, without which two versions are not enough.

    Args:
        batch: B, samples between two updates.
        memory_bytes: of a worker.
        workers_per_host: of which the replicas of a stage take the first places.
        within, across: bytes per second of a link inside a host, and between hosts.
    Raises: ConfigError when nothing fits.
    """
    best: TwoBwPlan | None = None
    for d in range(1, workers + 1):
        if batch % d:
            continue
        for p in range(1, workers // d + 1):
            if model.blocks % p:
                continue
            for recompute in (False, True):
                b = _largest(model, d, p, batch, recompute, memory_bytes)
                if b is None:
                    continue
                is_inside = d * p <= workers_per_host
                rate = throughput(
                    model,
                    d=d,
                    p=p,
                    b=b,
                    batch=batch,
                    recompute=recompute,
                    in_pipeline=within if is_inside else across,
                    cross_pipeline=within if d <= workers_per_host else across,
                )
                if best is None or rate > best.samples_per_second:
                    best = TwoBwPlan(
                        d=d,
                        p=p,
                        b=b,
                        recompute=recompute,
                        accumulation=batch // (d * b),
                        samples_per_second=rate,
                        memory_bytes=memory(model, p=p, b=b, recompute=recompute),
                    )
    if best is None:
        raise ConfigError(
            f"PipeDream-2BW has no configuration of {workers} workers that fits into {memory_bytes:.3g} bytes each "
            f"with {batch} samples between updates; give it more workers or memory"
        )
    return best


def throughput(
    model: EqualBlocks,
    *,
    d: int,
    p: int,
    b: int,
    batch: int,
    recompute: bool,
    in_pipeline: float,
    cross_pipeline: float,
) -> float:
    """Returns samples per second by the closed forms of section 3.3.3.

    Stages are equal, so that the maximum over stages is any one's; p = 1 is without pipelining. A stage between two
    others takes and sends activations and their gradients at two borders. Sums over replicas go round a ring, beside
    the micro-batches between two updates.
    """
    compute = model.seconds(b) / p * (_AGAIN if recompute else 1)
    borders = min(2, p - 1)
    transfers = borders * 2 * b * model.border_bytes / in_pipeline
    sums = 2 * (d - 1) / d * model.weight_bytes / p / cross_pipeline
    return d * b / max(compute + transfers, sums * d * b / batch)


def memory(model: EqualBlocks, *, p: int, b: int, recompute: bool) -> float:
    """Returns the bytes of a worker: W + A for p = 1 without recomputation, else 2 W / p + A + p a, where A is what the
    model keeps of a micro-batch and a an input of a stage; with recomputation A / p of it."""
    kept, inputs = b * model.activation_bytes, b * model.border_bytes
    if p == 1 and not recompute:
        return model.weight_bytes + model.state_bytes + kept
    stashed = kept / p if recompute else kept
    return (2 * model.weight_bytes + model.state_bytes) / p + stashed + p * inputs


def _largest(model: EqualBlocks, d: int, p: int, batch: int, recompute: bool, most: float) -> int | None:
    """Returns the most samples of a micro-batch that fit, None where not even one does."""
    of_pipeline = batch // d
    for b in range(of_pipeline // p, 0, -1):
        if of_pipeline % b == 0 and memory(model, p=p, b=b, recompute=recompute) <= most:
            return b
    return None
