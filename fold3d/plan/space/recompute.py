"""Whether blocks are computed again in the backward pass instead of keeping their activations.

The user's decision: the profile is measured with it, so the planner has nothing to add to the costs.
"""

from __future__ import annotations

from fold3d.plan.space.knob import Knob


def _parse(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("must be True or False")
    return text == "True"


KNOB = Knob(
    name="recompute",
    help="True: compute blocks again in the backward pass instead of keeping their activations",
    parse=_parse,
    candidates=lambda job, constraints, so_far: (False,),
    default=False,
    flag=lambda value, strategy: "True" if value else None,
)
