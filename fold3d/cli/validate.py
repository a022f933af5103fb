"""`fold3d validate`: proves a schedule in a CSV file complete, ordered and free of deadlock."""

from __future__ import annotations

import argparse
from typing import Any


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    made = subcommands.add_parser("validate", help="check a schedule in a CSV file", description=__doc__)
    made.add_argument(
        "file", metavar="FILE.csv", help="the schedule: a line per rank, cells such as 2F0; SEND and RECV are optional"
    )
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints what the file holds. Raises: ConfigError with the grid and the bad cell marked."""
    from fold3d import schedule as schedules
    from fold3d.schedule import draw

    loaded = schedules.load_csv(options.file)
    schedules.validate(loaded)
    kind = "with communication" if loaded.has_comm else "compute only"
    print(f"{options.file}: valid, {kind}")
    print(draw.summary(loaded))
