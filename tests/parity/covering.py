"""Which pairs of values the rules allow, and cases in which each of them stands."""

from __future__ import annotations

import csv
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

from tests.parity.settings import COSTLY, RULES, SETTINGS, Row, Rule

CASES = Path(__file__).with_name("cases.csv")
Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two (setting, value)."""


def pairs_of(row: Row) -> set[Pair]:
    """Returns the pairs that stand in a row."""
    return set(combinations(row.items(), 2))


def all_pairs() -> list[Pair]:
    """Returns every two values of two settings."""
    return [
        ((one, value), (other, another))
        for one, other in combinations(SETTINGS, 2)
        for value, another in product(SETTINGS[one], SETTINGS[other])
    ]


def completed(part: Row, rules: Sequence[Rule] = RULES) -> Row | None:
    """Returns a row of all settings that has the values of `part` and keeps the rules; None if there is none."""
    if not all(one.allows(part) for one in rules):
        return None
    left = {name: [*values] for name, values in SETTINGS.items() if name not in part}
    return _completed(part, _kept(left, part, [*part], rules), rules)


def _completed(row: Row, left: dict[str, list[Any]], rules: Sequence[Rule]) -> Row | None:
    """As `completed`. What has fewest values left is tried first: where it has none, nothing else is tried."""
    if not left:
        return {name: row[name] for name in SETTINGS}
    name = min(left, key=lambda one: len(left[one]))
    rest = {other: values for other, values in left.items() if other != name}
    for value in left[name]:
        tried = {**row, name: value}
        found = _completed(tried, _kept(rest, tried, [name], rules), rules)
        if found is not None:
            return found
    return None


def _kept(left: dict[str, list[Any]], row: Row, new: Sequence[str], rules: Sequence[Rule]) -> dict[str, list[Any]]:
    """Returns the values that are left beside those of `row`, of which the settings `new` were not looked at before."""
    kept = dict(left)
    for one in rules:
        if any(name in new for name in one.settings):
            for name in one.settings:
                if name in kept:
                    kept[name] = [value for value in kept[name] if one.allows({**row, name: value})]
    return kept


@functools.cache
def allowed() -> frozenset[Pair]:
    """Returns the pairs that stand in any row that keeps the rules."""
    found: set[Pair] = set()
    for pair in all_pairs():
        row = None if pair in found else completed(dict(pair))
        found |= set() if row is None else pairs_of(row)
    return frozenset(found)


def reason(pair: Pair) -> list[Rule]:
    """Returns as few rules as it takes to make a pair impossible: without any one of them it would be possible."""
    needed = list(RULES)
    for one in RULES:
        others = [other for other in needed if other is not one]
        if completed(dict(pair), others) is None:
            needed = others
    return needed


def excluded() -> dict[Pair, list[Rule]]:
    """Returns every other pair, with the rules that make it impossible."""
    return {pair: reason(pair) for pair in all_pairs() if pair not in allowed()}


def read(path: Path = CASES) -> list[Row]:
    """Returns the rows of the file.

    Raises: ValueError where settings or values are not those of the table.
    """
    values = {name: {str(value): value for value in SETTINGS[name]} for name in SETTINGS}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        unknown = [f"{name}={text}" for name, text in row.items() if text not in values.get(name, ())]
        if unknown or row.keys() != SETTINGS.keys():
            raise ValueError(f"{path.name}: {unknown or list(row)} is not of the table: python -m tests.parity --write")
    return [{name: values[name][row[name]] for name in SETTINGS} for row in rows]


def write(rows: Iterable[Mapping[str, Any]], path: Path = CASES) -> None:
    """Writes rows, of settings in the order of the table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(SETTINGS), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: str(value) for name, value in row.items()} for row in rows)


def generate(seconds: float) -> list[Row]:
    """Returns few rows in which all allowed pairs stand: those that covertable makes, made fewer by its annealing."""
    from covertable.main import Controller

    constraints = [{"operator": "fn", "requires": list(one.settings), "evaluate": one.allows} for one in RULES]
    controller = Controller({name: list(values) for name, values in SETTINGS.items()}, constraints=constraints)
    controller.make()
    rows = controller.optimize(tuning={"budget_ms": 1000 * seconds})
    return cheaper(sorted(({name: row[name] for name in SETTINGS} for row in rows), key=order))


def cheaper(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the first value of a costly setting wherever all pairs still stand in some row."""
    counts = Counter(pair for row in rows for pair in pairs_of(row))
    found = []
    for row in reversed(rows):  # from the families that take longest
        for name in COSTLY:
            changed = {**row, name: SETTINGS[name][0]}
            lost, won = pairs_of(row) - pairs_of(changed), pairs_of(changed) - pairs_of(row)
            if all(one.allows(changed) for one in RULES) and all(counts[pair] > 1 for pair in lost):
                counts.subtract(lost)
                counts.update(won)
                row = changed
        found.append(row)
    return sorted(found, key=order)


def order(row: Row) -> tuple[int, ...]:
    """Of models first: those of one family follow each other, and share references where they can."""
    names = ("family", "dropout", "dtype", "tied", "labels", "frozen", "clip", *SETTINGS)
    return tuple(SETTINGS[name].index(row[name]) for name in names)
