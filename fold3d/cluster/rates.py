"""How fast a job is on which GPUs: what was predicted, what was measured, and both put together with their errors.

A prediction is off in three ways: on everything by one factor, on a kind of GPU by another, and on a number of GPUs of
it by a third. Each is taken to be normal in the logarithm, so what was measured somewhere corrects the others as far as
they are off for the same reason, and their errors say how far that is (conditioning of a normal distribution).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from fold3d.cluster.fields import Field
from fold3d.cluster.jobs import Option
from fold3d.errors import ConfigError

OFF_ALL, OFF_KIND, OFF_COUNT = 0.35, 0.25, 0.1
"""Standard deviations of the logarithm: of a prediction as a whole, of a kind, of a number of GPUs of a kind."""
NOISE = 0.03
"""Of a measurement that says nothing of its own."""
_FAR = 2.0
"""Standard deviations between two rates whose order is settled."""
_UNITS = 1e12
"""A measured rate that is off its prediction by more than this factor is in another unit."""
_MOST = 1e30
"""No rate is higher, in whatever unit."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """What training measured on one place."""

    kind: str
    gpus: int
    rate: float
    """Work per second: the median over the steps since the last start."""
    error: float = NOISE
    """Standard deviation, relative."""
    layout: str = ""
    """How the model was spread, such as `dp1 tp1 pp2`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What is in `rates.json` beside a job's checkpoints: the newest of each place."""

    rates: tuple[Measurement, ...] = ()
    save_seconds: float = 0.0
    """From the signal until the checkpoint is there."""
    start_seconds: float = 0.0
    """From the start of the process until the end of the first new step."""
    done: float = 0.0
    """Work done, in the unit of the rates."""
    left: float = math.inf
    """Work left; infinite (null in the file) where nobody knows."""

    def with_rate(self, new: Measurement) -> Measured:
        """Returns it with another measurement, in place of an older one of the same place."""
        kept = [one for one in self.rates if (one.kind, one.gpus) != (new.kind, new.gpus)]
        return replace(self, rates=(*kept, new))

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        text = json.dumps(asdict(self) | {"version": _VERSION, "left": self.left if math.isfinite(self.left) else None})
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(text + "\n")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Returns what a job has measured; nothing where there is no file yet. Raises: ConfigError for another file."""
        told = Field.load(path, "measured rates", "delete the file, and all is measured anew", optional=True)
        if told.absent:
            return cls()
        if told.at("version").whole(least=1) != _VERSION:
            raise told.error(f"has version {told.value['version']}; this fold3d reads {_VERSION}")
        left = told.known("version", *(field.name for field in fields(cls))).at("left")
        return cls(
            rates=tuple(_measurement(one) for one in told.at("rates").entries()),
            save_seconds=told.at("save_seconds").number(unit="in seconds"),
            start_seconds=told.at("start_seconds").number(unit="in seconds"),
            done=told.at("done").number(),
            left=math.inf if left.value is None else left.number(),
        )


def _measurement(told: Field) -> Measurement:
    told.known(*(field.name for field in fields(Measurement)))
    return Measurement(
        kind=told.at("kind").text(),
        gpus=told.at("gpus").whole(least=1),
        rate=told.at("rate").number(above=0.0, most=_MOST),
        error=told.at("error").number(above=0.0, default=NOISE),
        layout=told.at("layout").text(default=""),
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate with its error."""

    rate: float
    error: float
    """Standard deviation of the logarithm: 0.1 is about 10 %."""
    measured: bool


def estimate(predicted: Sequence[Option], measured: Sequence[Measurement]) -> dict[Option, Estimate]:
    """Returns the rate of each option that was predicted: what was measured there, else the prediction as corrected by
    what was measured elsewhere. Options on which the job does not fit (rate 0) keep that.

    Raises: ConfigError for a measurement that is not positive, or that cannot be in the unit of the predictions.
    """
    fit = [option for option in predicted if option.rate > 0]
    known = {(option.kind, option.gpus): number for number, option in enumerate(fit)}
    seen = [one for one in measured if (one.kind, one.gpus) in known]
    for one in seen:
        if not one.rate > 0 or not one.error > 0:
            raise ConfigError(f"{one.kind} x{one.gpus}: measured {one.rate} +- {one.error}; both must be positive")
        told = fit[known[one.kind, one.gpus]].rate
        if not 1.0 / _UNITS < one.rate / told < _UNITS:
            raise ConfigError(
                f"{one.kind} x{one.gpus}: measured {one.rate:g}, predicted {told:g}; they must be in the same unit"
            )
    kind = np.array([option.kind for option in fit])
    same_kind = kind[:, None] == kind[None, :]
    spread = OFF_ALL**2 + OFF_KIND**2 * same_kind + OFF_COUNT**2 * np.eye(len(fit))
    off, left = np.zeros(len(fit)), spread
    if seen:
        at = np.array([known[one.kind, one.gpus] for one in seen])
        gap = np.array([math.log(one.rate / fit[number].rate) for one, number in zip(seen, at, strict=True)])
        noise = np.diag([one.error**2 for one in seen])
        gain = spread[:, at] @ np.linalg.inv(spread[np.ix_(at, at)] + noise)
        off, left = gain @ gap, spread - gain @ spread[at, :]
    places = {(one.kind, one.gpus): one for one in seen}
    found: dict[Option, Estimate] = {}
    for number, option in enumerate(fit):
        exact = places.get((option.kind, option.gpus))
        if exact is not None:  # a prediction that is far off must not pull at what was measured
            found[option] = Estimate(exact.rate, exact.error, measured=True)
        else:
            rate = option.rate * math.exp(float(off[number]))
            found[option] = Estimate(rate, math.sqrt(max(float(left[number, number]), 0.0)), measured=False)
    return found | {option: Estimate(0.0, 0.0, measured=False) for option in predicted if option.rate <= 0}


def probe(estimates: Mapping[Option, Estimate], gpus: Mapping[str, int]) -> Option | None:
    """Returns the option that should be tried for a round, of those for which there are enough GPUs: of a kind on which
    nothing was measured, the most promising first; else one whose rate per GPU may be above the best measured one of
    its kind. None where all is settled.

    A wrong prediction is not found by measuring elsewhere: what was measured corrects all kinds by one factor, so their
    order stays. So each kind is tried once, and after as many rounds as there are kinds the order is a measured one.

    Args:
        gpus: how many of each kind there are.
    """
    fit = {option: one for option, one in estimates.items() if one.rate > 0}
    measured = {option for option, one in fit.items() if one.measured}
    can = {option for option in fit if option.gpus <= gpus.get(option.kind, 0)}
    new = [option for option in fit if option in can and option.kind not in {one.kind for one in measured}]
    if new:
        return max(new, key=lambda option: fit[option].rate)
    close = []
    for option in can - measured:
        best = max(fit[one].rate for one in measured if one.kind == option.kind)
        if abs(math.log(fit[option].rate / best)) < _FAR * fit[option].error:
            close.append(option)
    return max(close, key=lambda option: (fit[option].rate, option.gpus), default=None)


def read_predictions(path: Path) -> tuple[Option, ...]:
    """Returns what a file of predictions says: `{"rates": [{"kind": "a100", "gpus": 2, "rate": 61000.0}, ...]}`.

    Rates are tokens per second. Raises: ConfigError.
    """
    return options_of(Field.load(path, "predicted rates").at("rates"))


def options_of(told: Field) -> tuple[Option, ...]:
    """Returns the options that JSON lists as above, or short as `{"a100": 4.0, "t4:2": 1.5}` (kind, or kind:gpus)."""
    made = []
    if isinstance(told.value, dict):
        for name, rate in told.items().items():
            found = re.fullmatch(r"([^:]+)(?::(\d{1,9}))?", name)
            if found is None:
                raise rate.error("is no kind of GPU; write KIND or KIND:GPUS, such as a100:2")
            made.append((found[1], Field(int(found[2] or 1), rate.path, rate.file), rate))
    elif isinstance(told.value, list):
        made = [(one.at("kind").text(), one.at("gpus"), one.at("rate")) for one in told.entries()]
    else:
        raise told.wrong('a list of rates with kind, gpus and rate, or an object such as {"a100": 4.0, "t4:2": 1.5}')
    options = tuple(Option(kind, gpus.whole(least=1), rate.number(most=_MOST)) for kind, gpus, rate in made)
    if not options or len({(one.kind, one.gpus) for one in options}) < len(options):
        raise told.error("must have some rates, one for each kind and number of GPUs")
    return options
