"""How gradients are summed over the replicas: in which way, in buckets of how many bytes, in which dtype, and how
long their sums may take.
"""

from __future__ import annotations

from dataclasses import replace

from fold3d.config import DP_SYNC, DP_SYNC_DTYPES, parse_bytes
from fold3d.errors import ConfigError
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import MIXED, Constraints

DEFAULT = "early"
WHOLE = "float32"


def _check(value: str, constraints: Constraints) -> None:
    if value not in DP_SYNC and not (value == MIXED and constraints.modes):
        raise ConfigError(f"dp_sync={value!r}: must be one of {', '.join(DP_SYNC)}, or None to choose")


KNOB = Knob(
    name="dp_sync",
    help=f"how gradients are summed over the replicas: {', '.join(DP_SYNC)}",
    parse=str,
    check=_check,
    flag=lambda value, strategy: None if strategy.dp == 1 or value == MIXED else value,
)


def gradient_share(dtype: str) -> float:
    """Returns what of a gradient's bytes is sent."""
    return 0.5 if dtype == "bfloat16" else 1.0


def _check_dtype(value: str, constraints: Constraints) -> None:
    if value not in DP_SYNC_DTYPES:
        raise ConfigError(f"dp_sync_dtype={value!r}: must be one of {', '.join(DP_SYNC_DTYPES)}")


DTYPE = Knob(
    name="dp_sync_dtype",
    help=f"dtype in which gradients are sent: {', '.join(DP_SYNC_DTYPES)}",
    parse=str,
    candidates=lambda job: (WHOLE,),  # the other changes the numbers: never by itself
    check=_check_dtype,
    default=WHOLE,
    costs=lambda job, value: replace(job, gradient_share=gradient_share(value)),
    flag=lambda value, strategy: None if value == WHOLE or strategy.dp == 1 else value,  # nothing is sent
)


def _check_delay(value: int, constraints: Constraints) -> None:
    if value not in (0, 1):
        raise ConfigError(f"gradient_delay={value!r}: must be 0 or 1")
    if value and constraints.dp_sync == "serial":
        raise ConfigError('gradient_delay=1 has nothing to hide with dp_sync="serial"; set another dp_sync, or 0')


DELAY = Knob(
    name="gradient_delay",
    help="1: apply gradients one step later, so that DP.sync has a full step; changes the numbers",
    parse=int,
    candidates=lambda job: (0,),  # never by itself
    check=_check_delay,
    default=0,
    costs=lambda job, value: replace(job, gradient_delay=value),
    flag=lambda value, strategy: str(value) if value else None,
)


WHOLE_CHUNK = 1 << 50
"""Makes every chunk one bucket."""


def _parse(text: str) -> int:
    try:
        size = parse_bytes("bucket_bytes", text)
    except ConfigError:
        size = None
    if size is None:
        raise ValueError('must be a number of bytes, such as 4194304, "4MiB", or 0 for a bucket per layer')
    return size


BUCKET_BYTES = Knob(
    name="bucket_bytes",
    help="least bytes of a bucket of gradients, such as 4MiB",
    parse=_parse,
    candidates=lambda job: (0, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, WHOLE_CHUNK),
    flag=lambda value, strategy: None if strategy.dp == 1 else str(value),
)
