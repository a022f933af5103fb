"""`fold3d draw`: a schedule as text or a picture."""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from fold3d.cli import schedule_option
from fold3d.cli.parser import picture
from fold3d.errors import ConfigError


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    made = subcommands.add_parser("draw", help="draw a schedule as text or a picture", description=__doc__)
    schedule_option.add(made)
    made.add_argument(
        "--recompute",
        metavar="CHUNKS",
        help="chunks to recompute: full, or one word per chunk, such as full/none; needs --comm",
    )
    made.add_argument(
        *("--picture", "--png"),
        dest="picture",
        type=picture,
        metavar="FILE",
        help="write a picture instead of text: .png, .svg or .pdf",
    )
    made.add_argument("--comm", action="store_true", help="also show SEND, RECV and REDUCE_GRAD, as ranks run them")
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints or writes the picture. Raises: ConfigError for a bad schedule or option."""
    from fold3d import schedule as schedules
    from fold3d.schedule import draw

    made = schedule_option.schedule_of(options, "draw")
    schedules.validate(made)
    if options.recompute is not None and not options.comm:
        raise ConfigError(f"--recompute {options.recompute} has no effect without --comm: it is part of what ranks run")
    if options.comm and not made.has_comm:
        made = schedules.lower(made, reduce=True, recompute=schedule_option.recompute_of(options, made))
    if options.picture:
        draw.picture(made, options.picture, title=schedule_option.title_of(options))
        print(options.picture)
        return
    if options.comm:
        print(schedules.grid(made), end="")
    else:
        print(draw.text(made, width=shutil.get_terminal_size((120, 24)).columns), end="")
    print(draw.summary(made))
