"""`python -m tests.parity`: the settings, the rules, the cases, and which pairs of values stand in them."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tests.parity import covering
from tests.parity.settings import ELSEWHERE, RULES, SETTINGS, Row


def main() -> None:
    """Prints the array; with --write after it was made anew."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"make the cases of {covering.CASES.name} anew")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to look for fewer cases, default 120")
    options = parser.parse_args()
    if options.write:
        covering.write(covering.generate(options.seconds))
    sys.stdout.writelines(f"{line}\n" for line in report(covering.read()))


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of what is printed."""
    yield "Settings"
    for name, values in SETTINGS.items():
        yield f"  {name:<18} {', '.join(map(str, values))}"
    yield "Not varied"
    for name, why in ELSEWHERE.items():
        yield f"  {name:<18} {why}"
    yield "Rules"
    for one in RULES:
        yield f"  {one.name:<29} {', '.join(one.settings)}: {one.reason}"
    yield "Cases"
    yield from table(rows)
    excluded = covering.excluded()
    yield f"Pairs that cannot be: {len(excluded)}"
    by_rules = defaultdict(list)
    for pair, rules in excluded.items():
        by_rules[" and ".join(one.name for one in rules)].append(pair)
    for names, pairs in by_rules.items():
        yield f"  {names}"
        for pair in pairs:
            yield "    " + " with ".join(f"{name}={value}" for name, value in pair)
    possible = covering.allowed()
    missing = sorted(possible - set().union(*map(covering.pairs_of, rows)), key=str)
    yield f"{len(rows)} cases; {len(possible) - len(missing)} of {len(possible)} possible pairs stand in them"
    for (one, value), (other, another) in missing:
        yield f"  missing: {one}={value} with {other}={another}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the rows under the settings' names, which stand on their heads: values are short, names are long."""
    columns = {name: [str(row[name]) for row in rows] for name in SETTINGS}
    widths = {name: max(map(len, texts), default=1) for name, texts in columns.items()}
    for line in range(max(map(len, SETTINGS))):
        yield "      " + " ".join(f"{name[line : line + 1]:<{widths[name]}}" for name in SETTINGS).rstrip()
    for number in range(len(rows)):
        yield f"{number:4}  " + " ".join(f"{columns[name][number]:<{widths[name]}}" for name in SETTINGS).rstrip()


if __name__ == "__main__":
    main()
