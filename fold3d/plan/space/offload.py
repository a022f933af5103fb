"""Which stashes leave the device between their forward and their backward, for a pool of host memory or of a file.

"boundaries": of chunks that recompute, which keep their blocks' inputs. "activations": of all chunks, with what their
graphs saved. Both perhaps of a share of the micro-batches. A stash that is used again at once
stays: csrc/core/passes/offload.cpp.

And whether the optimizer's state lies in host memory, where it is stepped (Ren et al., ZeRO-Offload, 2021).
"""

from __future__ import annotations

from dataclasses import replace

from fold3d.errors import ConfigError
from fold3d.offload import Offload
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory import Spared, keeps_boundaries
from fold3d.plan.space import recompute
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Constraints, Strategy


def _check(value: Offload, constraints: Constraints) -> None:
    fixed = recompute.KNOB.fixed(constraints)
    if value.what == "boundaries" and fixed is not None and not any(map(keeps_boundaries, fixed.choices)):
        raise ConfigError(
            f'offload="{value}" has no effect with recompute="{fixed}": no chunk recomputes as a whole or block by '
            "block"
        )


def _text(value: object) -> str:
    return str(value if isinstance(value, Offload) else Offload.parse(value))


KNOB: Knob[Offload] = Knob(
    name="offload",
    help="activations to offload between forward and backward: none, boundaries (what recomputed chunks keep), or "
    "activations; activations:50%%, of half of the micro-batches",
    parse=Offload.read,
    text=_text,
    candidates=lambda job: (Offload(),),  # short of memory: csrc/core/plan/sparing.cpp
    default=Offload(),
    check=_check,
    flag=lambda value, strategy: None if value.nothing else str(value),
)


def offloaded_chunks(strategy: Strategy) -> list[bool]:
    """Returns, of every chunk, whether its stashes leave the device; empty where none does."""
    return Spared.of(strategy.settings).offloaded(strategy.num_chunks)


_VALUES = {"true": True, "false": False}
_COPIES = 3
"""Of a parameter: it and its gradient go to the host, and it comes back."""


def _flag_of(text: str) -> bool:
    if text.lower() not in _VALUES:
        raise ValueError("must be True or False")
    return _VALUES[text.lower()]


def optimizer_costs(job: TrainingJob, value: bool) -> TrainingJob:
    """Returns the job with the update's time on the host, and that of its copies: as if none ran beside an update, so
    no step should take longer than that."""
    if not value or job.offload_optimizer:
        return job
    profile = job.profile
    trained = [name for name, size in profile.gradient_bytes.items() if size]
    gradients = sum(profile.gradient_bytes[name] for name in trained)
    weights = sum(profile.parameter_bytes[name] for name in trained)
    copies = _COPIES * weights / gradients / job.copy_bandwidth if gradients else 0.0
    update = profile.host_update_seconds + copies
    return replace(job, offload_optimizer=True, profile=replace(profile, update_seconds=update))


OPTIMIZER = Knob(
    name="offload_optimizer",
    help="True: keep the optimizer state in host memory and step it there",
    parse=_flag_of,
    candidates=lambda job: (False,),  # the host's memory and cores are the user's to give
    default=False,
    costs=optimizer_costs,
    flag=lambda value, strategy: "True" if value else None,
)
