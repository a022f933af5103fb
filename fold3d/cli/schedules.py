"""`fold3d schedules`: what schedules there are."""

from __future__ import annotations

import argparse
from typing import Any


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    made = subcommands.add_parser("schedules", help="list the schedules", description=__doc__)
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints a line per schedule: name, help, and the parameters that it uses beside pp and m."""
    from fold3d import schedule as schedules

    infos = schedules.registry()
    width = max(len(info.name) for info in infos)
    for info in infos:
        segments = f"segments={info.segments}" if info.segments else "segments"
        used = [
            name
            for name, is_used in (
                (segments, info.uses_segments),
                ("group_size", info.uses_group_size),
                ("turn", info.uses_turn),
            )
            if is_used
        ]
        print(f"{info.name:<{width}}  {info.help}" + (f"  [{', '.join(used)}]" if used else ""))
