"""The campaign's table: which fault happens on which rank, at which moment of a training, under which layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LONG = {"async_save": True, "save_steps": 3, "eval_strategy": "no", "max_steps": 15}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "dp_sync": "zero1", "async_save": True},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2, "tp_overlap": "none"},
    "dp2 pp2": {"dp": 2, "pp": 2, "segments": 2, "dp_sync": "zero1", "async_save": True},
    "dp2 late": {"dp": 2, "gradient_delay": 1},
    "dp2 early": {"dp": 2, "dp_sync": "early"},
    "pp2 planned": {"pp": 2, "segments": "auto", "async_save": True},
    "dp2 pp2 long": {"dp": 2, "pp": 2, "segments": 2, "dp_sync": "zero1"} | _LONG,
    "pp2 long": {"pp": 2, "gradient_accumulation_steps": 4} | _LONG,
    "pp2 saves": {"pp": 2} | _LONG | {"async_save": False, "save_steps": 1},
}
_SHORT = tuple(name for name, settings in LAYOUTS.items() if "max_steps" not in settings)

ENDS, GOES_ON, IS_PREEMPTED, SPREADS = "ends", "goes on", "is preempted", "spreads"
IS_PASSED_OVER, IS_REFUSED = "is passed over", "refused"
"""What must come of a fault: the job ends with a named error and resumes identically; goes on identically; saves, ends
and resumes identically; goes on with nothing but NaN in the weights of all ranks, as one process would, and resumes
identically from a checkpoint before; resumes from the checkpoint before; is told that it cannot be resumed."""

KINDS: dict[str, tuple[str, str]] = {
    "raise": (ENDS, r"ZeroDivisionError: broken in "),
    "out of memory": (ENDS, r"can't allocate memory"),
    "exit": (ENDS, r"rank {rank}"),
    "SIGKILL": (ENDS, r"rank {rank}"),
    "SIGSTOP": (ENDS, r"rank {rank}"),
    "hang": (ENDS, r"rank {rank}"),
    "link down": (ENDS, r"rank \d"),
    "pause": (GOES_ON, ""),
    "slow": (GOES_ON, ""),
    "busy": (GOES_ON, ""),
    "clock jump": (GOES_ON, ""),
    "fork": (GOES_ON, ""),
    "full disk": (ENDS, r"do not fit"),
    "file limit": (ENDS, r"File too large"),
    "blocked folder": (ENDS, r"Not a directory|NotADirectoryError"),
    "read-only folder": (ENDS, r"Permission denied|PermissionError"),
    "store dead": (ENDS, r"the job's store"),
    "message corrupted": (ENDS, r"rank \d"),
    "link slow": (GOES_ON, ""),
    "NaN": (SPREADS, ""),
    "worker killed": (ENDS, r"DataLoader worker .* (is killed|exited unexpectedly)"),
    "SIGTERM": (IS_PREEMPTED, ""),
    "SIGUSR1": (IS_PREEMPTED, ""),
    "SIGUSR2": (IS_PREEMPTED, ""),
    "truncated": (IS_PASSED_OVER, r"cut short|is missing|no complete"),
    "missing": (IS_PASSED_OVER, r"is missing|neither|it holds no"),
    "bit flipped": (IS_PASSED_OVER, r"cut short|damaged|header|no complete|utf|JSON"),
    "foreign": (IS_REFUSED, r"belongs to (a|another) model"),
}
"""By kind what must come of it, and a pattern in what every living rank writes."""

PLACES: dict[str, tuple[str, ...]] = {
    "connecting": ("fold3d.engine.engine.WorldGroup",),
    "recording": ("fold3d.engine.planning.cut_model.record",),
    "measuring": ("fold3d.engine.planning.planner.profile_of",),
    "measuring links": ("fold3d.profile.network.measure_network",),
    "planning": ("fold3d.engine.planning.planner._check_memory",),
    "cutting": ("fold3d.engine.planning.cut_model.RankModel",),
    "building": ("fold3d.engine.builder.Pipeline",),
    "sums": ("fold3d.data_parallel.dp_sync.DpSync.end", "fold3d.data_parallel.one_replica.OneReplica.end"),
    "norm": ("fold3d.data_parallel.dp_sync.DpSync.norm", "fold3d.data_parallel.one_replica.OneReplica.norm"),
    "saving": ("fold3d.trainer.saving.CheckpointingTrainer._save_optimizer_and_scheduler",),
    "writing": ("fold3d.checkpoint.delivery.write_all",),
    "loading": ("fold3d.trainer.saving.CheckpointingTrainer._load_weights",),
}
"""What fold3d calls at a moment. Other moments are in the model, in the data and in callbacks, see `training.py`."""
MOMENTS = (
    *("import", "connecting", "recording", "measuring", "measuring links", "planning", "cutting", "building", "data"),
    *("forward", "backward", "sums", "norm", "update", "gather", "barrier", "callback", "evaluation", "saving"),
    *("writing", "loading", "end"),
)
EVENTS = ("on_train_begin", "on_substep_end", "on_log", "on_evaluate", "on_save", "on_epoch_end")
"""Moments in callbacks of the user's, besides those above."""
RANDOM, RANDOM_MOMENTS = "random", 30
"""Of the moments that chance chooses the first word, and how many there are."""
AT_ONCE = (
    *("import", "connecting", *MOMENTS[2:8], "loading", "writing", "end"),
    *("on_train_begin", "on_epoch_end", "on_save"),
)
"""Those that a training comes by once, whose first time counts, or that know their step themselves."""
ENDS_A_STEP = ("evaluation", "saving", "callback", "gather", "on_substep_end", "on_log", "on_evaluate")
"""Those that belong to the end of a step."""
OTHERS = ("raise", "out of memory", "exit", "SIGKILL", "SIGSTOP", "link down", "pause", "slow", "clock jump", "fork")
"""Kinds that can happen at any moment."""
ALL = -1
"""In the place of a rank: the fault happens on each."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault."""

    kind: str
    moment: str
    layout: str
    rank: int
    """Or ALL."""
    again: str = ""
    """Layout of the training that goes on, where it is another one."""

    @property
    def name(self) -> str:
        """Returns what a test calls it."""
        rank = "all ranks" if self.rank == ALL else f"rank {self.rank}"
        return f"{self.kind}-{self.moment}-{self.layout}-{rank}".replace(" ", "_")

    @property
    def outcome(self) -> str:
        """Returns what must come of it."""
        return KINDS[self.kind][0]

    @property
    def pattern(self) -> str:
        """Returns a pattern in what every living rank writes."""
        return KINDS[self.kind][1].format(rank=self.rank)

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the layout's."""
        return LAYOUTS[self.layout]

    @property
    def world(self) -> int:
        """Returns the number of ranks."""
        return world_of(self.layout)


def world_of(layout: str) -> int:
    """Returns the number of ranks of a layout."""
    settings = LAYOUTS[layout]
    return int(settings.get("dp", 1) * settings.get("pp", 1) * settings.get("tp", 1))


def _makes_sense(kind: str, moment: str, layout: str) -> bool:
    if moment == "import":  # nobody knows the rank yet: the launcher ends the others
        return kind in ("raise", "exit", "pause", "slow", "clock jump")
    if moment == "barrier":
        return kind in ("SIGKILL", "SIGSTOP", "pause", "slow")
    if moment == "writing" and kind == "exit":  # of a thread
        return False
    if moment in ("measuring", "measuring links", "planning"):
        return layout == "pp2 planned"
    is_cut = any(name in LAYOUTS[layout] for name in ("pp", "tp"))
    return moment != "recording" or is_cut


def _of_all_moments() -> Iterator[Case]:
    """Every kind at every moment; layouts and ranks take turns."""
    turn = itertools.count()
    for kind, moment in itertools.product(OTHERS, MOMENTS):
        number = next(turn) + OTHERS.index(kind)
        turns = itertools.islice(itertools.cycle(_SHORT), number % len(_SHORT), number % len(_SHORT) + len(_SHORT))
        layout = next((name for name in turns if _makes_sense(kind, moment, name)), None)
        if layout is not None:
            rank = 0 if moment == "planning" else (number // 2) % world_of(layout)  # rank 0 alone plans
            yield Case(kind=kind, moment=moment, layout=layout, rank=rank)


def _of_saving() -> Iterator[Case]:
    for layout in ("dp2", "pp2", "tp2", "dp2 pp2"):
        last = world_of(layout) - 1
        yield Case(kind="full disk", moment="saving", layout=layout, rank=0)
        yield Case(kind="blocked folder", moment="callback", layout=layout, rank=0)
        yield Case(kind="file limit", moment="saving", layout=layout, rank=0)
        yield Case(kind="file limit", moment="writing", layout=layout, rank=last)
        yield Case(kind="read-only folder", moment="saving", layout=layout, rank=0)
        yield Case(kind="read-only folder", moment="writing", layout=layout, rank=last)


def _of_signals() -> Iterator[Case]:
    for number, (kind, moment) in enumerate(
        itertools.product(("SIGTERM", "SIGUSR1", "SIGUSR2"), ("forward", "gather", "evaluation", "saving", "writing"))
    ):
        layout = ("dp2", "pp2", "dp2 pp2", "tp2")[number % 4]
        yield Case(kind=kind, moment=moment, layout=layout, rank=number % world_of(layout))
    for number, moment in enumerate(("forward", "evaluation", "saving", "writing", "callback")):
        for layout in ("dp2", "pp2", "dp2 pp2", "tp2")[number % 2 :: 2]:
            yield Case(kind="SIGTERM", moment=moment, layout=layout, rank=ALL)


def _of_checkpoints() -> Iterator[Case]:
    files = ("model.safetensors", "optimizer.pt", "trainer_state.json", "fold3d.json", "scheduler.pt")
    for number, (kind, file) in enumerate(itertools.product(("truncated", "missing", "bit flipped"), files)):
        # Without fold3d.json it is a checkpoint of the stock Trainer; a flipped bit in a schedule is another number.
        if (kind, file) not in (("missing", "fold3d.json"), ("bit flipped", "scheduler.pt")):
            yield Case(kind=kind, moment=file, layout=("dp2", "pp2", "tp2")[number % 3], rank=0)
    for layout in ("dp2", "pp2", "tp2"):
        yield Case(kind="foreign", moment="model.safetensors", layout=layout, rank=0)


def _of_others() -> Iterator[Case]:
    for layout, moment in (("dp2", "forward"), ("pp2", "backward"), ("tp2", "forward"), ("dp2 pp2", "update")):
        yield Case(kind="hang", moment=moment, layout=layout, rank=world_of(layout) - 1)
    for layout in ("pp2", "dp2 pp2"):  # for longer than a rank may be silent, while no other thread of Python runs
        yield Case(kind="busy", moment="cutting", layout=layout, rank=0)
    for layout in ("dp2", "pp2"):
        yield Case(kind="worker killed", moment="data", layout=layout, rank=1)
    for number, event in enumerate(EVENTS):
        layout = tuple(LAYOUTS)[number % 4]
        yield Case(kind="raise", moment=event, layout=layout, rank=world_of(layout) - 1)
    for layout, moment in (("dp2", "sums"), ("pp2", "forward"), ("tp2", "backward"), ("dp2 pp2", "norm")):
        yield Case(kind="link slow", moment=moment, layout=layout, rank=1)
        yield Case(kind="message corrupted", moment=moment, layout=layout, rank=1)
    for layout in ("dp2", "pp2", "tp2", "dp2 pp2", "dp2 late", "dp2 early"):
        yield Case(kind="NaN", moment="backward", layout=layout, rank=world_of(layout) - 1)
    for layout, moment in (("dp2", "forward"), ("pp2", "evaluation"), ("tp2", "callback"), ("dp2 pp2", "writing")):
        yield Case(kind="store dead", moment=moment, layout=layout, rank=0)
    for layout, kind in itertools.product(_SHORT, ("SIGKILL", "raise")):  # where most of the time goes
        yield Case(kind=kind, moment="forward", layout=layout, rank=0)
        yield Case(kind=kind, moment="backward", layout=layout, rank=world_of(layout) - 1)


def _of_random_moments() -> Iterator[Case]:
    for number in range(RANDOM_MOMENTS):
        again = "pp2 long" if number % 3 == 2 else ""
        yield Case(kind="SIGKILL", moment=f"{RANDOM} {number:02}", layout="dp2 pp2 long", rank=number % 4, again=again)
        yield Case(kind="SIGTERM", moment=f"{RANDOM} {number:02}", layout="pp2 saves", rank=ALL)


def cases() -> list[Case]:
    """Returns all of them, each once."""
    every = (_of_all_moments(), _of_saving(), _of_signals(), _of_checkpoints(), _of_others(), _of_random_moments())
    return list(dict.fromkeys(itertools.chain.from_iterable(every)))


GATE = (
    *(("SIGKILL", "backward", "dp2 pp2"), ("SIGKILL", "writing", "dp2"), ("SIGSTOP", "forward", "pp2")),
    *(("raise", "sums", "dp2"), ("link down", "forward", "pp2"), ("pause", "update", "tp2")),
    *(("SIGTERM", "evaluation", "dp2"), ("truncated", "optimizer.pt", "pp2"), ("foreign", "model.safetensors", "tp2")),
)
"""Kind, moment and layout of those that every change must pass."""


def of_the_gate() -> list[Case]:
    """Returns one case for each entry of GATE."""
    return [
        Case(kind=kind, moment=moment, layout=layout, rank=world_of(layout) - 1 if moment in MOMENTS else 0)
        for kind, moment, layout in GATE
    ]
