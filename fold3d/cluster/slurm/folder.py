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
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fold3d.cluster.fields import Field
from fold3d.cluster.jobs import Option, Place
from fold3d.cluster.rates import Measured, read_predictions
from fold3d.cluster.rounds import Ledger
from fold3d.errors import ConfigError

VARIABLE = "FOLD3D_CLUSTER"
"""Names the folder; default ~/.fold3d/cluster."""
_LEDGER, _LOCK = "ledger.json", "lock"
_LONGEST = 200
"""Bytes of a job's name: file systems take 255, of which files beside it need some."""
_NEVER = 1e11
"""Of time.time(): three thousand years."""


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
        found = re.fullmatch(r"([\w.-]+):(\d{1,9})x(\d{1,9})", text)
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
        with _working_on(self.path, f"set {VARIABLE} to a folder that can be made and written"):
            self.path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps others out. Raises: ConfigError where another round is in progress."""
        with _working_on(self.path, f"set {VARIABLE} to a folder that can be made and written"):
            file = (self.path / _LOCK).open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another command works in {self.path}; try again when it is done") from None
            except OSError as error:
                raise ConfigError(f"{file.name} cannot be locked: {error}; set {VARIABLE} to another folder") from None
            yield

    def of(self, name: str) -> Path:
        """Returns the folder of a job."""
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith(".") or len(name.encode()) > _LONGEST:
            shown = repr(name) if len(name) <= 60 else f"{name[:20]!r}.. of {len(name)} letters"
            raise ConfigError(
                f"{shown} is no name for a job: letters, digits, _ - and . (not in front), {_LONGEST} bytes at most"
            )
        if name == _LOCK or name.startswith(_LEDGER):
            raise ConfigError(f"{name!r} is no name for a job: a file in {self.path} is called so; take another")
        return self.path / name

    def add(self, wish: Wish) -> None:
        """Adds a job. Raises: ConfigError where there is one of the name."""
        folder = self.of(wish.name)
        if (folder / "job.json").exists():
            raise ConfigError(f"there is a job {wish.name}: fold3d cluster cancel {wish.name}, or take another name")
        with _working_on(folder, "take another name, or make room for it"):
            folder.mkdir(exist_ok=True)
        told = asdict(wish) | {"deadline": wish.deadline if math.isfinite(wish.deadline) else None}
        _write(folder / "job.json", json.dumps(told))

    def remove(self, name: str) -> None:
        """Removes a job. Raises: ConfigError where there is none."""
        if not (self.of(name) / "job.json").exists():
            raise ConfigError(f"there is no job {name} in {self.path}")
        with _working_on(self.of(name), "try again when nothing uses it"):
            shutil.rmtree(self.of(name))

    def wishes(self) -> tuple[list[Wish], dict[str, str]]:
        """Returns all jobs, the first submitted first, and by name why others cannot be read."""
        found, damaged = [], {}
        for path in self.path.glob("*/job.json"):
            try:
                found.append(_wish(path))
            except ConfigError as error:
                damaged[path.parent.name] = str(error)
        return sorted(found, key=lambda wish: (wish.submitted, wish.name)), damaged

    def ended(self, name: str) -> str | None:
        """Returns how a job has ended: done, or failed with a status; None where it has not."""
        path = self.of(name) / "ended"
        with _working_on(path, f"fold3d cluster cancel {name}"):
            return path.read_text(errors="replace").strip() if path.exists() else None

    def ledger(self) -> tuple[Ledger, float]:
        """Returns what jobs have received, and until when that is entered (time.time(); 0 at the beginning)."""
        remedy = "delete the file, and what jobs receive counts anew"
        told = Field.load(self.path / _LEDGER, "what jobs have received", remedy, optional=True)
        if told.absent:
            return Ledger(), 0.0
        told.known("seconds", "until", "received", "debts")
        received, debts = (dict(map(_entry, told.at(part).entries())) for part in ("received", "debts"))
        seconds, until = (told.at(name).number(most=_NEVER, unit="in seconds") for name in ("seconds", "until"))
        return Ledger(seconds, received, debts), until

    def keep(self, ledger: Ledger, until: float) -> None:
        """Writes them."""
        parts = {"received": ledger.received, "debts": ledger.debts}
        lists = {name: [[list(p.jobs), p.kind, p.gpus, s] for p, s in part.items()] for name, part in parts.items()}
        _write(self.path / _LEDGER, json.dumps({"seconds": ledger.seconds, "until": until, **lists}))


def _wish(path: Path) -> Wish:
    """Returns what a job's file says."""
    name = path.parent.name
    told = Field.load(path, "a job", f"fold3d cluster cancel {name}, and submit it again")
    told.known(*(field.name for field in fields(Wish)))
    deadline = told.at("deadline")
    return Wish(
        name=told.at("name").one_of((name,)),
        script=told.at("script").text(),
        arguments=tuple(one.text() for one in told.at("arguments").entries()),
        on=tuple(_on(one) for one in told.at("on").entries()),
        output=told.at("output").text(),
        weight=told.at("weight").number(above=0.0),
        group=told.at("group").text(),
        deadline=math.inf if deadline.value is None else deadline.number(),
        submitted=told.at("submitted").number(most=_NEVER),
    )


def _on(told: Field) -> On:
    told.known(*(field.name for field in fields(On)))
    nodes, per_node = told.at("nodes").whole(least=1), told.at("per_node").whole(least=1)
    return On(told.at("kind").text(), nodes, per_node, told.at("rate").number())


def _entry(told: Field) -> tuple[Place, float]:
    jobs, kind, gpus, seconds = told.entries(4, '[["job"], "a100", 2, 360.0]')
    names = tuple(one.text() for one in jobs.entries())
    return Place(names, kind.text(), gpus.whole(least=1)), seconds.number(least=-_NEVER, most=_NEVER)


def _write(path: Path, text: str) -> None:
    with _working_on(path, f"make room there, or set {VARIABLE} to another folder"):
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(text + "\n")
        part.replace(path)


@contextmanager
def _working_on(path: Path, remedy: str) -> Iterator[None]:
    """Errors of the file system become ConfigErrors that say what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; {remedy}") from None
