"""`python -m zoo`: which classes of the installed transformers are exact when cut, or when their weights are shared,
and why others are refused."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from zoo import table
from zoo.cases import Case, all_cases, select
from zoo.outputs import judge_outputs
from zoo.run import progress, run
from zoo.shards import judge_shards
from zoo.verdict import Verdict, judge


def main() -> None:
    """Judges the chosen cases; prints each and how many there are of each outcome."""
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument(
        "--only", metavar="PATTERN", nargs="+", default=[], help="of classes, kinds or model types, such as 'T5*'"
    )
    parser.add_argument("--every", metavar="N", type=int, default=1, help="take each N-th of these")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=90.0, help="of a case, default 90")
    parser.add_argument("--write", metavar="FILE", type=Path, help="renew the rows of these cases in a table")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tp", action="store_true", help="of models whose weights two processes share")
    how.add_argument(
        "--outputs", action="store_true", help="of models that are asked for hidden states, attentions, ..."
    )
    parser.add_argument("--missing", action="store_true", help="only those that FILE has no such verdict of yet")
    options = parser.parse_args()
    if options.missing and not options.write:
        parser.error("--missing needs --write FILE, in which it looks")
    cases = select(all_cases(), options.only, options.every)
    if options.missing:
        cases = table.missing(options.write, cases, outputs=options.outputs)
    judging = judge_shards if options.tp else judge_outputs if options.outputs else judge
    found: dict[Case, Verdict] = {}
    for number, (case, verdict) in enumerate(run(cases, options.timeout, judging), 1):
        found[case] = verdict
        progress(number, len(cases), case.name)
        sys.stdout.write(
            f"{case.name:<48} {verdict.outcome:<10} {verdict.inputs:<18} {verdict.reason} {verdict.more}\n"
        )
        sys.stdout.flush()
        if options.write:  # each at once, so that an interruption loses one
            table.write(options.write, {case: verdict}, outputs=options.outputs, tp=options.tp)
    for outcome, count in Counter(verdict.outcome for verdict in found.values()).most_common():
        sys.stdout.write(f"{count:4} {outcome}\n")


if __name__ == "__main__":
    main()
