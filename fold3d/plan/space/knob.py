"""Knob: one thing that can be chosen about a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from fold3d.errors import ConfigError
from fold3d.plan.job import TrainingJob
from fold3d.plan.strategy import Constraints, Strategy

T = TypeVar("T")
_FIELDS = {field.name for field in fields(Constraints)} - {"settings"}


@dataclass(frozen=True, kw_only=True)
class Knob(Generic[T]):
    """Where its value stands, what it may be, how it is written and what the planner tries.

    A knob that has a field of its name in Constraints and Strategy is part of what csrc/core/plan searches: what it may
    be stands there. All others are in `settings` of both: the search tries each of their values with everything else.
    """

    name: str
    help: str
    """For the command line."""
    parse: Callable[[str], T]
    """Inverse of `text`. Raises: ValueError."""
    candidates: Callable[[TrainingJob], Sequence[T]] = lambda job: ()
    """Values worth a try where it is free. Of knobs in `settings`."""
    default: T | None = None
    """Value where it is free and nothing is planned. Of knobs in `settings`."""
    text: Callable[[T], str] = str
    check: Callable[[T, Constraints], None] = lambda value, constraints: None
    """Raises ConfigError for a value that cannot be, alone or with the others."""
    costs: Callable[[TrainingJob, T], TrainingJob] = lambda job, value: job
    """Returns the job with what the value changes about times, bytes and network. Of knobs in `settings`."""
    flag: Callable[[T, Strategy], str | None] = lambda value, strategy: str(value)
    """Returns what the Trainer's command line says to get the value; None: nothing."""
    undecided: T | None = None
    """Value that leaves the choice to real steps, taken where the predictions for others are too close to choose by.
    Of knobs in `settings`; None: the fastest is taken."""
    needs_tp: bool = False
    """Whether it is of no interest without tensor parallelism, where nothing mentions it."""

    def __post_init__(self) -> None:
        if not self.has_field and self.default is None:
            raise ValueError(f"knob {self.name!r} has no field in Strategy, so it needs a default")

    @property
    def has_field(self) -> bool:
        """Whether the value is a field of Constraints and Strategy."""
        return self.name in _FIELDS

    def of(self, decided: Strategy) -> T:
        """Returns what was decided. Raises: KeyError where the knob was not known."""
        if self.has_field:
            found: T = getattr(decided, self.name)
            return found
        return self.parse(dict(decided.settings)[self.name])

    def fixed(self, constraints: Constraints) -> T | None:
        """Returns what the user has decided. Raises: ConfigError for text that is no value."""
        if self.has_field:
            found: T | None = getattr(constraints, self.name)
            return found
        text = dict(constraints.settings).get(self.name)
        return None if text is None else self.read(text)

    def read(self, text: str) -> T:
        """Returns the value with this text form. Raises: ConfigError."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name}={text!r}: {error}") from None

    def values(self, job: TrainingJob, constraints: Constraints) -> Sequence[T]:
        """Returns what is to be tried: the fixed value alone, or the candidates."""
        value = self.fixed(constraints)
        return self.candidates(job) if value is None else (value,)
