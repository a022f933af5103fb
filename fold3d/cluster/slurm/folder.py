"""Small files under the user's folder: a job's wishes, and what all have received. Written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fold3d.cluster.jobs import Option, Place
from fold3d.cluster.rates import Measured, read_predictions
from fold3d.cluster.rounds import Ledger
from fold3d.errors import ConfigError

VARIABLE = "FOLD3D_CLUSTER"
"""Names the folder; default ~/.fold3d/cluster."""


@dataclass(frozen=True, slots=True)
class On:
    """GPUs that a job may run on."""

    kind: str
    nodes: int
    per_node: int
    rate: float
    """Predicted work per second; where nothing is predicted, its GPUs."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.nodes}x{self.per_node}"

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.nodes * self.per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """A job that was submitted."""

    name: str
    script: str
    arguments: tuple[str, ...]
    on: tuple[On, ...]
    output: str
    """Where it writes checkpoints, `rates.json` and `preempted.json`."""
    weight: float = 1.0
    group: str = ""
    deadline: float = math.inf
    """Of time.time()."""
    submitted: float = 0.0

    @property
    def options(self) -> tuple[Option, ...]:
        """What was predicted."""
        return tuple(Option(one.kind, one.gpus, one.rate) for one in self.on)

    def place(self, here: Place) -> On:
        """Returns the nodes that a place means."""
        return next(one for one in self.on if (one.kind, one.gpus) == (here.kind, here.gpus))

    def measured(self) -> Measured:
        """Returns what it has measured."""
        return Measured.read(Path(self.output) / "rates.json")


def parse_on(texts: list[str], predictions: Path | None) -> tuple[On, ...]:
    """Returns what `a100:1x2` (one node, two GPUs) and the file of predictions say. Raises: ConfigError."""
    rates = {(one.kind, one.gpus): one.rate for one in read_predictions(predictions)} if predictions else {}
    made = []
    for text in texts:
        found = re.fullmatch(r"([\w.-]+):(\d+)x(\d+)", text)
        if found is None or not int(found[2]) or not int(found[3]):
            raise ConfigError(f"--on {text} is no kind of GPU; write KIND:NODESxGPUS, such as a100:1x2")
        gpus = int(found[2]) * int(found[3])
        rate = rates.get((found[1], gpus), float(gpus) if predictions is None else 0.0)
        made.append(On(found[1], int(found[2]), int(found[3]), rate))
    if len({(one.kind, one.gpus) for one in made}) < len(made):
        raise ConfigError(f"--on {' --on '.join(texts)}: each kind and number of GPUs may be named once")
    if not any(one.rate for one in made):
        raise ConfigError(f"{predictions} predicts no rate for --on {' --on '.join(texts)}")
    return tuple(made)


class Folder:
    """The user's folder."""

    def __init__(self, path: Path | None = None) -> None:
        said = os.environ.get(VARIABLE)
        self.path = path or (Path(said) if said else Path.home() / ".fold3d" / "cluster")
        self.path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps others out. Raises: ConfigError where another round is in progress."""
        with (self.path / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another command works in {self.path}; try again when it is done") from None
            yield

    def of(self, name: str) -> Path:
        """Returns the folder of a job."""
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise ConfigError(f"{name!r} is no name for a job: letters, digits, _ . and - only")
        return self.path / name

    def add(self, wish: Wish) -> None:
        """Adds a job. Raises: ConfigError where there is one of the name."""
        folder = self.of(wish.name)
        if (folder / "job.json").exists():
            raise ConfigError(f"there is a job {wish.name}: fold3d cluster cancel {wish.name}, or take another name")
        folder.mkdir(exist_ok=True)
        told = asdict(wish) | {"deadline": wish.deadline if math.isfinite(wish.deadline) else None}
        _write(folder / "job.json", json.dumps(told))

    def remove(self, name: str) -> None:
        """Removes a job. Raises: ConfigError where there is none."""
        if not (self.of(name) / "job.json").exists():
            raise ConfigError(f"there is no job {name} in {self.path}")
        shutil.rmtree(self.of(name))

    def wishes(self) -> list[Wish]:
        """Returns all jobs, the first submitted first."""
        found = []
        for path in self.path.glob("*/job.json"):
            told = json.loads(path.read_text())
            told["on"] = tuple(On(**one) for one in told["on"])
            told["arguments"] = tuple(told["arguments"])
            told["deadline"] = math.inf if told["deadline"] is None else told["deadline"]
            found.append(Wish(**told))
        return sorted(found, key=lambda wish: (wish.submitted, wish.name))

    def ended(self, name: str) -> str | None:
        """Returns how a job has ended: done, or failed with a status; None where it has not."""
        path = self.of(name) / "ended"
        return path.read_text().strip() if path.exists() else None

    def ledger(self) -> tuple[Ledger, float]:
        """Returns what jobs have received, and until when that is entered (time.time(); 0 at the beginning)."""
        path = self.path / "ledger.json"
        if not path.exists():
            return Ledger(), 0.0
        told = json.loads(path.read_text())
        entries = [{Place(tuple(jobs), k, g): s for jobs, k, g, s in told[part]} for part in ("received", "debts")]
        return Ledger(told["seconds"], *entries), told["until"]

    def keep(self, ledger: Ledger, until: float) -> None:
        """Writes them."""
        parts = {"received": ledger.received, "debts": ledger.debts}
        lists = {name: [[list(p.jobs), p.kind, p.gpus, s] for p, s in part.items()] for name, part in parts.items()}
        _write(self.path / "ledger.json", json.dumps({"seconds": ledger.seconds, "until": until, **lists}))


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text + "\n")
    part.replace(path)
