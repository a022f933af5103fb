"""The schedule that a subcommand is about: a registered name with its sizes, or a CSV file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.schedule import Schedule


def add(parser: argparse.ArgumentParser) -> None:
    """Adds SCHEDULE and its sizes to a subcommand's parser."""
    parser.add_argument("schedule", metavar="SCHEDULE", help="a name listed by `fold3d schedules`, or a CSV file")
    parser.add_argument("-p", "--pp", type=int, help="pipeline stages; required with a name")
    parser.add_argument("-m", "--micro-batches", type=int, help="micro-batches per step; required with a name")
    parser.add_argument("-s", "--segments", type=int, help="segments of the model, each cut into pp chunks; default 1")
    parser.add_argument(
        "-n", "--group-size", type=int, help="N: micro-batches per segment (schedule fold); k (schedule kfkb)"
    )
    parser.add_argument("--turn", choices=("all", "1f1b"), help="how the last segment turns around (schedule fold)")


def schedule_of(options: argparse.Namespace, command: str) -> Schedule:
    """Returns the schedule that the options name. Raises: ConfigError for one that does not exist or fit."""
    from fold3d import schedule as schedules

    sizes = {name: getattr(options, name) for name in ("pp", "micro_batches", "segments", "group_size", "turn")}
    if options.schedule.endswith(".csv"):
        for name, value in sizes.items():
            if value is not None:
                raise ConfigError(f"--{name.replace('_', '-')}={value} has no effect: the file says it; leave it out")
        return schedules.load_csv(options.schedule)
    for name in ("pp", "micro_batches"):
        if sizes[name] is None:
            example = f"fold3d {command} {options.schedule} -p 4 -m 8"
            raise ConfigError(f"--{name.replace('_', '-')} is missing, as in: {example}")
    if (options.group_size or 0) > options.micro_batches:
        raise ConfigError(
            f"--group-size={options.group_size} is more than --micro-batches={options.micro_batches}, of which a group "
            "consists; lower it"
        )
    return schedules.generate(options.schedule, **{k: v for k, v in sizes.items() if v is not None})


def recompute_of(options: argparse.Namespace, schedule: Schedule) -> list[bool]:
    """Returns of each chunk whether it recomputes, as the option --recompute says.

    Raises: ConfigError for more than a schedule can tell: it knows nothing of what is inside of a chunk.
    """
    from fold3d.recompute import Recompute

    number = schedule.pp * schedule.segments
    choices = Recompute.parse("none" if options.recompute is None else options.recompute).of_chunks(number)
    inside = [choice for choice in choices if not (choice.full or choice.nothing)]
    if inside:
        raise ConfigError(f"--recompute {options.recompute}: a schedule has whole chunks; say full or none of each")
    return [choice.full for choice in choices]


def title_of(options: argparse.Namespace) -> str:
    """Returns the schedule's name with the parameters that make it what it is."""
    name = Path(options.schedule).stem
    details = [f"N={options.group_size}"] if options.group_size else []
    details += [f"turn {options.turn}"] if options.turn else []
    return f"{name} ({', '.join(details)})" if details else name
