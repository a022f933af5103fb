"""PTD-P's three takeaways (Narayanan et al. 2021, section 3) as a planner: t, p, d and b of a GPT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fold3d.errors import ConfigError

_STATE = 18
"""Bytes of a parameter with Adam in mixed precision: 2 of the weight; 4 each of the gradient, the main copy and the two
moments."""
_NUMBER = 2
"""Bytes of an activation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A GPT by the letters of the paper."""

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    @property
    def parameters(self) -> float:
        """P, equation 3 of the paper (4.3 of the dissertation)."""
        weights = 12 * self.layers * self.hidden**2
        embeddings = (self.vocabulary + self.sequence) / (12 * self.layers * self.hidden)
        return weights * (1 + 13 / (12 * self.hidden) + embeddings)

    def flops(self, batch: int) -> float:
        """Returns F, floating-point operations of a step of `batch` samples with recomputation: equation 2 (4.2)."""
        products = 96 * batch * self.sequence * self.layers * self.hidden**2
        logits = self.vocabulary / (16 * self.layers * self.hidden)
        return products * (1 + self.sequence / (6 * self.hidden) + logits)

    def memory(self, *, t: int, p: int, b: int) -> float:
        """Returns the bytes of a GPU of the first stage, which holds most micro-batches of 1F1B: weights and optimizer;
        the input of each of its layers for p micro-batches, which recomputation keeps; what one layer keeps while it
        is computed again, s b h (10 + 24 / t + 5 a s / (h t)) (Korthikanti et al. 2022, equation 2); and, on one
        stage, logits and their gradient, of which the softmax takes 4 bytes a number besides."""
        tokens = b * self.sequence
        inputs = self.layers * tokens * self.hidden * _NUMBER  # of layers / p layers for p micro-batches
        inside = tokens * self.hidden * (10 + 24 / t + 5 * self.heads * self.sequence / (self.hidden * t))
        logits = tokens * self.vocabulary / t * (2 * _NUMBER + 4) if p == 1 else 0
        return self.parameters / (t * p) * _STATE + inputs + inside + logits


@dataclass(frozen=True, kw_only=True, slots=True)
class PtdPlan:
    """How PTD-P would train."""

    t: int
    """Tensor-parallel ranks."""
    p: int
    """Stages."""
    d: int
    """Replicas."""
    b: int
    """Samples of a micro-batch."""
    memory_bytes: float
    """Of a GPU."""


def ptd_p(
    model: Transformer,
    *,
    gpus: int,
    gpus_per_host: int,
    memory_bytes: float,
    batch: int,
    seconds: Callable[[int], float],
) -> PtdPlan:
    """Returns what the takeaways say.

    1. Tensor parallelism up to the GPUs of a host, then pipeline parallelism. 2. The smallest t p with which the model
    fits, the rest is data parallelism. 3. The micro-batch with the least (b' / b + p - 1) (t_f(b) + t_b(b)), b' = B / d
    (equation 1, 4.1 in the dissertation), of those that fit.

    Args:
        batch: B, samples of a step.
        seconds: samples of a micro-batch -> t_f(b) + t_b(b), of a stage, as far as the sizes differ: any unit.
    Raises: ConfigError when nothing fits, or nothing divides GPUs, layers, heads and samples.
    """
    for t, p in _degrees(model, gpus, gpus_per_host):
        d = gpus // (t * p)
        if gpus % (t * p) or batch % d or model.memory(t=t, p=p, b=1) > memory_bytes:
            continue
        per_replica = batch // d
        sizes = [b for b in range(1, per_replica + 1) if per_replica % b == 0]
        fitting = [b for b in sizes if model.memory(t=t, p=p, b=b) <= memory_bytes]
        best = min(fitting, key=lambda b: (per_replica // b + p - 1) * seconds(b))
        return PtdPlan(t=t, p=p, d=d, b=best, memory_bytes=model.memory(t=t, p=p, b=best))
    raise ConfigError(
        f"PTD-P has no t and p for {gpus} GPUs of {memory_bytes:.3g} bytes, {model.layers} layers and {batch} samples; "
        "give it more GPUs or memory, or a batch that more replicas divide"
    )


def _degrees(model: Transformer, gpus: int, gpus_per_host: int) -> list[tuple[int, int]]:
    """Returns (t, p) in the order of t p: t alone up to a host, then p with the largest t."""
    shards = [t for t in range(1, min(gpus, gpus_per_host) + 1) if gpus_per_host % t == 0 and model.heads % t == 0]
    stages = [p for p in range(2, gpus // shards[-1] + 1) if model.layers % p == 0]
    return [(t, 1) for t in shards] + [(shards[-1], p) for p in stages]
