"""Which stashes leave the device between their forward and their backward, for a pool of host memory or of a file.

"boundaries": of chunks that recompute, which keep their blocks' inputs. "activations": of all chunks, with what their
graphs saved. A stash that is used again at once stays: csrc/core/passes/offload.cpp.
"""

from __future__ import annotations

from fold3d.config import OFFLOAD
from fold3d.errors import ConfigError
from fold3d.plan.constraints import Constraints
from fold3d.plan.space import recompute
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Strategy
from fold3d.recompute import Choice, Recompute


def _parse(text: str) -> str:
    if text not in OFFLOAD:
        raise ValueError(f"must be one of {', '.join(OFFLOAD)}")
    return text


def _check(value: str, constraints: Constraints) -> None:
    fixed = recompute.KNOB.fixed(constraints)
    if value == "boundaries" and fixed is not None and not any(map(_keeps_boundaries, fixed.choices)):
        raise ConfigError(
            f'offload="boundaries" has no effect with recompute="{fixed}": no chunk recomputes as a whole or block by '
            "block"
        )


def _keeps_boundaries(choice: Choice) -> bool:
    return choice.full or choice.every == 1


KNOB = Knob(
    name="offload",
    help="what leaves the device between forward and backward: none, boundaries (what recomputed chunks keep), or "
    "activations",
    parse=_parse,
    candidates=lambda job, constraints, so_far: ("none",),
    default="none",
    check=_check,
    flag=lambda value, strategy: None if value == "none" else value,
)


def offloaded_chunks(strategy: Strategy) -> list[bool]:
    """Returns, of every chunk, whether its stashes leave the device; empty where none does."""
    settings = dict(strategy.settings)
    how = settings.get(KNOB.name, KNOB.default)
    if how == "activations":
        return [True] * strategy.num_chunks
    if how != "boundaries":
        return []
    choices = Recompute.read(settings.get(recompute.KNOB.name, "none")).of_chunks(strategy.num_chunks)
    moves = [_keeps_boundaries(choice) for choice in choices]
    return moves if any(moves) else []
