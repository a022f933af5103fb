"""The parity grid: every small layout with every interesting number of micro-batches, the other settings cycling."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from fold3d.errors import ConfigError
from fold3d.schedule import generate, registry

STEPS = 3
LENGTH = 9
"""Tokens per row: odd, and no multiple of anything else."""
ROWS = 2
"""Rows per micro-batch."""
BUCKET_BYTES = 1000
"""Small enough that these models have several buckets on a rank."""
TRAINER_EVERY = 7
"""One configuration in so many goes through fold3d.Trainer instead of fold3d.Engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training run: a layout, how its micro-batches are ordered, and what is trained."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    segments: int = 1
    m: int = 1
    schedule: str = "1f1b"
    group_size: int | None = None
    transport: str = "auto"
    dp_sync: str = "auto"
    tp_overlap: str = "auto"
    recompute: bool | str = False
    offload: str = "none"
    through: str = "engine"
    family: str = "gpt2"
    tied: bool = True
    dtype: str = "float64"
    clip: bool = True
    labels: str = "full"
    layers: int = 4
    dropout: float = 0.0
    frozen: bool = False
    sequence_parallel: bool | str = "auto"
    offload_optimizer: bool = False
    micro_batch_size: int | None = None
    kernels: str = "torch"
    dp_sync_dtype: str = "float32"
    bucket_bytes: int = BUCKET_BYTES
    preempt: bool = True
    partition: str = "blocks"
    offload_disk: bool = False
    gradient_delay: int = 0
    flush: bool = True
    weight_versions: str = "2bw"
    delay_correction: str = "none"

    @property
    def ranks(self) -> int:
        """Processes the case needs."""
        return self.dp * self.tp * self.pp

    @property
    def total(self) -> int:
        """Micro-batches of one step over all replicas."""
        return self.dp * self.m

    @property
    def layout(self) -> tuple[int, int, int]:
        """(dp, pp, segments)."""
        return self.dp, self.pp, self.segments

    @property
    def roles(self) -> frozenset[str]:
        """What this m stands for; the same number may stand for several."""
        values = {"1": 1, "2": 2, "pp-1": self.pp - 1, "pp": self.pp, "2pp+1": 2 * self.pp + 1}
        return frozenset(role for role, value in values.items() if value == self.m)

    @property
    def name(self) -> str:
        """Short text for the test's name: layout first, then whatever differs from the defaults."""
        layout = f"dp{self.dp}-tp{self.tp}-pp" if self.tp > 1 else f"dp{self.dp}-pp"
        words = [f"{layout}{self.pp}-seg{self.segments}-m{self.m}", self.schedule]
        words[-1] += "" if self.group_size is None else f"({self.group_size})"
        words += [self.family, self.dtype.replace("float", "fp"), self.labels, self.through]
        words += ["tied" if self.tied else "untied", "clip" if self.clip else "noclip"]
        words += [word for word, on in (("recompute", self.recompute is True), ("frozen", self.frozen)) if on]
        words += [f"recompute-{self.recompute}"] if isinstance(self.recompute, str) else []
        words += [] if self.micro_batch_size is None else [f"size{self.micro_batch_size}"]
        words += ["kernels"] if self.kernels != "torch" else []
        words += ["late"] if self.gradient_delay else []
        words += [] if self.flush else ["flowing"]
        words += [self.weight_versions] if self.weight_versions != "2bw" else []
        words += [self.delay_correction] if self.delay_correction != "none" else []
        words += ["rounded"] if self.dp_sync_dtype != "float32" else []
        words += [f"bucket{self.bucket_bytes}"] if self.bucket_bytes != BUCKET_BYTES else []
        words += [] if self.preempt else ["in-turn"]
        words += [self.partition] if self.partition != "blocks" else []
        words += ["on-host"] if self.offload_optimizer else []
        words += [f"offload-{self.offload}{'-disk' * self.offload_disk}"] if self.offload != "none" else []
        words += [value for value in (self.transport, self.dp_sync, self.tp_overlap) if value != "auto"]
        words += ["sequence" if self.sequence_parallel else "whole"] if self.sequence_parallel != "auto" else []
        return "-".join(words)

    def alone(self) -> Case:
        """The same training in one process and one piece: everything that may not change a number at its default."""
        kept = ("family", "tied", "dtype", "clip", "labels", "layers", "dropout", "frozen")
        kept += ("gradient_delay", "delay_correction")
        return Case(m=self.total, **{name: getattr(self, name) for name in kept})


ELSEWHERE = ("kfkb", "shifted_critical_path", "zb_v")
"""Other orders of the same actions, and another style: test_parity_schedules.py. With them there would be half as many
cases again."""
FLAGS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float64", "float32"),
    "clip": (True, False),
    "tied": (True, False),
    "recompute": (False, True),
}
"""Each value occurs in every layout and with every m."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "family": ("gpt2", "llama", "opt", "plain"),
    "labels": ("full", "ragged", "padded", "empty"),
    "schedule": tuple(info.name for info in registry() if info.name not in ELSEWHERE),
    "transport": ("auto", "c10d"),
}
"""Too many values for one layout's few m: each occurs with every dp, pp and segments it can go with, and every m."""
SINGLE = frozenset(info.name for info in registry() if not info.uses_segments)
"""Schedules of one segment."""


def micro_batches(pp: int) -> list[int]:
    """Returns 1, 2, pp - 1, pp and 2 pp + 1 without repetition; pp - 1 = 0 is no number of micro-batches."""
    return sorted({1, 2, pp - 1, pp, 2 * pp + 1} - {0})


def layouts() -> list[tuple[int, int, int]]:
    """Returns every (dp, pp, segments) of at most four processes and eight chunks, and three with 3 segments."""
    small = [
        (dp, pp, segments)
        for dp, pp, segments in itertools.product(range(1, 5), range(1, 5), (1, 2, 4))
        if dp * pp <= 4 and pp * segments <= 8
    ]
    return [*small, (1, 1, 3), (1, 2, 3), (2, 2, 3)]


def grid() -> list[Case]:
    """Returns all layouts times all m, with the other settings spread so that `wanted(case)` all occur."""
    bases = [
        Case(dp=dp, pp=pp, segments=segments, m=m, layers=8 if pp * segments > 4 else 4)
        for dp, pp, segments in layouts()
        for m in micro_batches(pp)
    ]
    return _spread(bases, random.Random(3))


def eight() -> list[Case]:
    """Returns a handful of configurations for eight processes."""
    shapes = [(2, 4, 1, 9), (2, 4, 2, 4), (2, 4, 2, 3), (4, 2, 2, 5), (4, 2, 4, 2), (1, 8, 1, 7), (8, 1, 1, 2)]
    bases = [Case(dp=dp, pp=pp, segments=seg, m=m, layers=8) for dp, pp, seg, m in shapes]
    return _spread(bases, random.Random(5))


def wanted(case: Case) -> Iterator[tuple[Any, ...]]:
    """Yields the pairs (place in the grid, setting) that `case` shows."""
    for name, values in (FLAGS | CHOICES).items():
        value = getattr(case, name)
        if value not in values:
            continue
        places: Iterable[tuple[str, Any]] = [("dp", case.dp), ("pp", case.pp), ("segments", case.segments)]
        if name in FLAGS:
            places = [("layout", case.layout)]
        for place in [*places, *(("m", role) for role in case.roles)]:
            yield (*place, name, value)


def possible(case: Case) -> bool:
    """Whether the settings of `case` go together."""
    if case.family == "plain" and case.labels == "empty":
        return False  # the mean over no label is not a number, in one process as well
    if case.transport != "auto" and (case.pp == 1 or case.through == "trainer"):
        return False
    if case.through == "trainer" and case.family == "plain":
        return False  # its loss depends on how rows are divided, which the stock Trainer's data loader does not know
    if case.schedule == "interleaved" and case.segments == 1:
        return False  # the same order as 1f1b
    return _can_be_made(case.schedule, case.pp, case.segments, case.m, case.group_size)


@functools.cache
def _can_be_made(schedule: str, pp: int, segments: int, m: int, group_size: int | None) -> bool:
    try:
        generate(schedule, pp=pp, segments=segments, micro_batches=m, group_size=group_size)
    except ConfigError:
        return False
    return True


def _spread(bases: list[Case], random_: random.Random) -> list[Case]:
    """Gives every base the settings that show most pairs not shown yet; of equals, one whose reference is known."""
    shown: set[tuple[Any, ...]] = set()
    references: set[Case] = set()
    chosen: list[Case] = []
    for number, base in enumerate(bases):
        options = []
        while len(options) < 100:
            settings = {name: random_.choice(values) for name, values in (FLAGS | CHOICES).items()}
            if settings["schedule"] == "fold":
                settings["group_size"] = random_.choice((None, 1, (base.m + 1) // 2, base.m))
            if number % TRAINER_EVERY == TRAINER_EVERY - 1:
                settings |= {"through": "trainer", "transport": "auto"}
            option = replace(base, **settings)
            if base.pp == 1:
                option = replace(option, transport="auto")
            if possible(option):
                options.append(option)
        best = max(options, key=lambda case: (_worth(set(wanted(case)) - shown), case.alone() in references))
        chosen.append(best)
        shown.update(wanted(best))
        references.add(best.alone())
    return chosen


def _worth(pairs: set[tuple[Any, ...]]) -> int:
    # Schedules without segments fit few layouts, so a place for them must not be missed.
    return sum(3 if pair[-1] in SINGLE else 1 for pair in pairs)


assert {field.name for field in fields(Case)} >= {*FLAGS, *CHOICES}
