"""`fold3d draw`: a schedule as text or PNG."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.schedule import Schedule


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    made = subcommands.add_parser("draw", help="draw a schedule as text or PNG", description=__doc__)
    made.add_argument("schedule", metavar="SCHEDULE", help="a name out of `fold3d schedules`, or a CSV file")
    made.add_argument("-p", "--pp", type=int, help="stages; required with a name")
    made.add_argument("-m", "--micro-batches", type=int, help="micro-batches per step; required with a name")
    made.add_argument("-s", "--segments", type=int, help="folds of the model, default 1")
    made.add_argument("-n", "--group-size", type=int, help="N: micro-batches per segment (schedule fold)")
    made.add_argument("--turn", choices=("all", "1f1b"), help="how the last segment turns around (schedule fold)")
    made.add_argument("--png", metavar="FILE", help="write a picture instead of text")
    made.add_argument("--comm", action="store_true", help="with SEND, RECV and REDUCE_GRAD: what the ranks run")
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints or writes the picture. Raises: ConfigError for a bad schedule or option."""
    from fold3d import schedule as schedules
    from fold3d.schedule import draw

    made = _schedule(options)
    schedules.validate(made)
    if options.comm and not made.has_comm:
        made = schedules.lower(made, reduce=True)
    if options.png:
        draw.png(made, options.png, title=_title(options))
        print(options.png)
        return
    if options.comm:
        print(schedules.grid(made), end="")
    else:
        print(draw.text(made, width=shutil.get_terminal_size((120, 24)).columns), end="")
    print(draw.summary(made))


def _schedule(options: argparse.Namespace) -> Schedule:
    from fold3d import schedule as schedules

    sizes = {name: getattr(options, name) for name in ("pp", "micro_batches", "segments", "group_size", "turn")}
    if options.schedule.endswith(".csv"):
        for name, value in sizes.items():
            if value is not None:
                raise ConfigError(f"--{name.replace('_', '-')}={value} has no effect: the file says it; leave it out")
        return schedules.load_csv(options.schedule)
    for name in ("pp", "micro_batches"):
        if sizes[name] is None:
            raise ConfigError(f"--{name.replace('_', '-')} is missing, as in: fold3d draw {options.schedule} -p 4 -m 8")
    return schedules.generate(options.schedule, **{k: v for k, v in sizes.items() if v is not None})


def _title(options: argparse.Namespace) -> str:
    name = Path(options.schedule).stem
    details = [f"N={options.group_size}"] if options.group_size else []
    details += [f"turn {options.turn}"] if options.turn else []
    return f"{name} ({', '.join(details)})" if details else name
