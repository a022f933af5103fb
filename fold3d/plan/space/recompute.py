"""What is computed again in the backward pass instead of kept."""

from __future__ import annotations

from fold3d.plan.space.knob import Knob
from fold3d.recompute import Recompute


def _text(value: object) -> str:
    return str(value if isinstance(value, Recompute) else Recompute.parse(value))


KNOB: Knob[Recompute] = Knob(
    name="recompute",
    help="what to recompute in the backward: none, full, blocks, blocks:2, or names of modules",
    parse=Recompute.read,
    text=_text,
    candidates=lambda job: (Recompute(),),  # short of memory: csrc/core/plan/sparing.cpp
    default=Recompute(),
    flag=lambda value, strategy: None if value.nothing else str(value),
)
