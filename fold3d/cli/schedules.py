"""`fold3d draw`, `schedules`, `validate`; and the options that name a schedule, which `fold3d simulate` has, too."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.schedule import Schedule

_PICTURES = (".png", ".svg", ".pdf")


def picture(text: str) -> str:
    """Returns the name of a picture's file, whose suffix says its format; the `type` of such an option."""
    if os.path.splitext(text)[1] not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
    return text


def add(subcommands: Any) -> None:
    """Adds the subcommands to the parser."""
    command = subcommands.add_parser(
        "draw",
        help="draw a schedule as text or a picture",
        description="`fold3d draw`: a schedule as text or a picture.",
    )
    add_schedule(command)
    command.add_argument(
        "--recompute",
        metavar="CHUNKS",
        help="chunks to recompute: full, or one word per chunk, such as full/none; needs --comm",
    )
    command.add_argument(
        *("--picture", "--png"),
        dest="picture",
        type=picture,
        metavar="FILE",
        help="write a picture instead of text: .png, .svg or .pdf",
    )
    command.add_argument("--comm", action="store_true", help="also show SEND, RECV and REDUCE_GRAD, as ranks run them")
    command.set_defaults(run=run_draw)
    command = subcommands.add_parser(
        "schedules", help="list the schedules", description="`fold3d schedules`: what schedules there are."
    )
    command.set_defaults(run=run_schedules)
    command = subcommands.add_parser(
        "validate",
        help="check a schedule in a CSV file",
        description="`fold3d validate`: proves a schedule in a CSV file complete, ordered and free of deadlock.",
    )
    command.add_argument(
        "file", metavar="FILE.csv", help="the schedule: a line per rank, cells such as 2F0; SEND and RECV are optional"
    )
    command.set_defaults(run=run_validate)


def add_schedule(parser: argparse.ArgumentParser) -> None:
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
        if sizes[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {sizes[name]}; it must be at least 1")
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


def run_draw(options: argparse.Namespace) -> None:
    """Prints or writes the picture. Raises: ConfigError for a bad schedule or option."""
    from fold3d import schedule as schedules
    from fold3d.schedule import draw

    made = schedule_of(options, "draw")
    schedules.validate(made)
    if options.recompute is not None and not options.comm:
        raise ConfigError(f"--recompute {options.recompute} has no effect without --comm: it is part of what ranks run")
    if options.comm and not made.has_comm:
        made = schedules.lower(made, reduce=True, recompute=recompute_of(options, made))
    if options.picture:
        draw.picture(made, options.picture, title=title_of(options))
        print(options.picture)
        return
    if options.comm:
        print(schedules.grid(made), end="")
    else:
        print(draw.text(made, width=shutil.get_terminal_size((120, 24)).columns), end="")
    print(draw.summary(made))


def run_schedules(options: argparse.Namespace) -> None:
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


def run_validate(options: argparse.Namespace) -> None:
    """Prints what the file holds. Raises: ConfigError with the grid and the bad cell marked."""
    from fold3d import schedule as schedules
    from fold3d.schedule import draw

    loaded = schedules.load_csv(options.file)
    schedules.validate(loaded)
    kind = "with communication" if loaded.has_comm else "compute only"
    print(f"{options.file}: valid, {kind}")
    print(draw.summary(loaded))
