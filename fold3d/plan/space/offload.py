"""Which stashes leave the device between their forward and their backward, for a pool of host memory or of a file.

"boundaries": of chunks that recompute, which keep their blocks' inputs. "activations": of all chunks, with what their
graphs saved. A stash that is used again at once stays: csrc/core/passes/offload.cpp.
"""

from __future__ import annotations

from fold3d.config import OFFLOAD
from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.memory.spared import Spared, keeps_boundaries
from fold3d.plan.space import recompute
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Strategy


def _parse(text: str) -> str:
    if text not in OFFLOAD:
        raise ValueError(f"must be one of {', '.join(OFFLOAD)}")
    return text


def _check(value: str, constraints: Constraints) -> None:
    fixed = recompute.KNOB.fixed(constraints)
    if value == "boundaries" and fixed is not None and not any(map(keeps_boundaries, fixed.choices)):
        raise ConfigError(
            f'offload="boundaries" has no effect with recompute="{fixed}": no chunk recomputes as a whole or block by '
            "block"
        )


KNOB = Knob(
    name="offload",
    help="what leaves the device between forward and backward: none, boundaries (what recomputed chunks keep), or "
    "activations",
    parse=_parse,
    candidates=lambda job, constraints, so_far: ("none",),  # more where memory is short: plan/memory/sparing.py
    default="none",
    check=_check,
    flag=lambda value, strategy: None if value == "none" else value,
)


def offloaded_chunks(strategy: Strategy) -> list[bool]:
    """Returns, of every chunk, whether its stashes leave the device; empty where none does."""
    return Spared.of(strategy.settings).offloaded(strategy.num_chunks)
