"""How many bytes of gradients are summed together at least."""

from __future__ import annotations

from collections.abc import Sequence

from fold3d.config import parse_bytes
from fold3d.errors import ConfigError
from fold3d.plan.job import Job
from fold3d.plan.space.knob import Knob, SoFar
from fold3d.plan.strategy import Constraints

WHOLE_CHUNK = 1 << 50
"""Makes every chunk one bucket."""


def _candidates(job: Job, constraints: Constraints, so_far: SoFar) -> Sequence[int]:
    return (0, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, WHOLE_CHUNK)


def _parse(text: str) -> int:
    try:
        size = parse_bytes("bucket_bytes", text)
    except ConfigError:
        size = None
    if size is None:
        raise ValueError('must be a number of bytes, such as 4194304, "4MiB", or 0 for a bucket per layer')
    return size


KNOB = Knob(
    name="bucket_bytes",
    help="least bytes of a bucket of gradients, such as 4MiB",
    parse=_parse,
    candidates=_candidates,
    flag=lambda value, strategy: None if strategy.dp == 1 else str(value),
)
