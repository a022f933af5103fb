"""`fold3d cluster submit`, `round`, `status`, `cancel`: the user's own jobs on Slurm."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

from fold3d.cli.tables import columns
from fold3d.errors import ConfigError

_LONGEST = 366 * 86400.0
"""Seconds of a round: a year."""


def add(subcommands: Any) -> None:
    """Adds the subcommands to the parser."""
    made = subcommands.add_parser("submit", help="add a job that can run on several kinds of GPU", description=__doc__)
    made.add_argument("name")
    made.add_argument("script", help="train.py, started by torchrun, or a program that is run once per node")
    made.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the script")
    made.add_argument(
        "--on",
        action="append",
        required=True,
        metavar="KIND:NODESxGPUS",
        help="where it can run, such as a100:1x2; may be repeated",
    )
    made.add_argument(
        "--output", required=True, metavar="FOLDER", help="output_dir of the job, on storage that all nodes mount"
    )
    made.add_argument(
        "--predicted",
        metavar="FILE",
        help="file with predicted rates in tokens per second; default: proportional to GPUs",
    )
    made.add_argument("--weight", type=float, default=1.0, help="weight in the policy; default 1")
    made.add_argument("--group", default="", help="group, for the policy hierarchical")
    made.add_argument("--deadline", type=float, metavar="HOURS", help="deadline in hours from now")
    made.set_defaults(run=run_submit)
    made = subcommands.add_parser("round", help="start, move and stop jobs by a policy", description=__doc__)
    made.add_argument("--policy", default="fair", metavar="NAME", help="policy; default fair")
    made.add_argument("--gpus", metavar="KIND:COUNT,..", help="GPUs that jobs may use; default: all of the cluster")
    made.add_argument(
        "--every", type=float, metavar="SECONDS", help="repeat rounds at this interval; default: one round, for cron"
    )
    made.add_argument(
        "--round", type=float, metavar="SECONDS", help="time between rounds of cron; default --every or 360"
    )
    made.set_defaults(run=run_round)
    made = subcommands.add_parser("status", help="list the jobs and what each is owed", description=__doc__)
    made.set_defaults(run=run_status)
    made = subcommands.add_parser("cancel", help="end a job and forget it", description=__doc__)
    made.add_argument("name")
    made.set_defaults(run=run_cancel)


def run_submit(options: argparse.Namespace) -> None:
    """Writes the job down; the next round may start it. Raises: ConfigError."""
    from fold3d.cluster.fields import Field
    from fold3d.cluster.slurm.folder import Folder, Wish, parse_on
    from fold3d.cluster.workload import MOST_HOURS

    script = Path(options.script).absolute()
    if not script.is_file():
        raise ConfigError(f"{script} is no file")
    weight = Field(options.weight, "--weight").number(above=0.0)
    deadline = math.inf
    if options.deadline is not None:
        deadline = Field(options.deadline, "--deadline").number(above=0.0, most=MOST_HOURS, unit="in hours from now")
    output = Path(options.output).absolute()
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is no folder; name one, which need not be there yet")
    now, folder = time.time(), Folder()
    wish = Wish(
        name=options.name,
        script=str(script),
        arguments=tuple(options.arguments),
        on=parse_on(options.on, Path(options.predicted) if options.predicted else None),
        output=str(output),
        weight=weight,
        group=options.group,
        deadline=now + 3600.0 * deadline,
        submitted=now,
    )
    with folder.locked():
        folder.add(wish)
    print(f"{options.name}: waits for the next `fold3d cluster round`")


def run_round(options: argparse.Namespace) -> None:
    """Holds one round, or rounds for ever. Raises: ConfigError in the first; later ones are tried again."""
    from fold3d.cluster.fields import Field
    from fold3d.cluster.jobs import Cluster
    from fold3d.cluster.policies import Policy
    from fold3d.cluster.rounds import Rules
    from fold3d.cluster.slurm import commands
    from fold3d.cluster.slurm.folder import Folder
    from fold3d.cluster.slurm.moves import hold

    given = {"--round": options.round, "--every": options.every}
    said = [
        Field(value, name).number(above=0.0, most=_LONGEST, unit="in seconds")
        for name, value in given.items()
        if value is not None
    ]
    policy = Policy(name=options.policy)
    rules = Rules(seconds=[*said, 360.0][0], fill=policy.fills)
    given_gpus = Cluster.parse(options.gpus) if options.gpus is not None else None

    def once() -> None:
        held = hold(Folder(), policy, given_gpus or commands.gpus(), rules)
        for name, reason in sorted(held.left_out.items()):
            print(f"{name} is left as it is: {reason}")
        places = ", ".join(f"{name} on {here.gpus} x {here.kind}" for name, here in sorted(held.placed.items()))
        print(f"{policy.label}: {places or 'nobody runs'}; {held.moved} started or moved", flush=True)

    begin = time.monotonic()
    once()
    while options.every is not None:
        time.sleep(max(0.0, begin + options.every - time.monotonic()))
        begin = time.monotonic()
        try:
            once()
        except ConfigError as error:
            print(f"this round failed, the next is in {options.every:g} s: {error}", flush=True)


def run_status(options: argparse.Namespace) -> None:
    """Prints a table. Raises: ConfigError."""
    from fold3d.cluster.slurm.folder import Folder
    from fold3d.cluster.slurm.moves import look

    folder = Folder()
    state, (ledger, _) = look(folder), folder.ledger()
    rows: list[tuple[str, ...]] = [("job", "group", "weight", "state", "on", "rate", "", "owed, GPU hours")]
    for wish in state.wishes:
        here = state.place_of(wish)
        rate, source = "", ""
        if here is not None:
            known = next(e for o, e in state.estimates[wish.name].items() if (o.kind, o.gpus) == (here.kind, here.gpus))
            rate, source = f"{known.rate:.4g} +- {known.error:.0%}", "measured" if known.measured else "predicted"
        owed = sum(seconds * place.gpus for place, seconds in ledger.debts.items() if wish.name in place.jobs) / 3600.0
        now = state.queued[wish.name][-1].state.lower() if wish.name in state.queued else "waiting"
        on = str(wish.place(here)) if here is not None else ""
        rows.append((wish.name, wish.group, f"{wish.weight:g}", now, on, rate, source, f"{owed:.2f}"))
    rows += [(wish.name, wish.group, f"{wish.weight:g}", how, "", "", "", "") for wish, how in state.ended]
    rows += [(name, "", "", "left as it is", "", "", "", "") for name in sorted(state.left_out)]
    print("\n".join(columns(rows)))
    for name, reason in sorted(state.left_out.items()):
        print(f"{name}: {reason}")


def run_cancel(options: argparse.Namespace) -> None:
    """Ends the job's processes, which save, and forgets it; its output stays. Raises: ConfigError."""
    from fold3d.cluster.slurm import commands
    from fold3d.cluster.slurm.folder import Folder

    folder = Folder()
    with folder.locked():
        if not (folder.of(options.name) / "job.json").exists():
            raise ConfigError(f"there is no job {options.name} in {folder.path}")
        mine = [job for job in commands.queue() if job.name == options.name and job.comment.startswith("fold3d ")]
        commands.cancel([job.id for job in mine])
        folder.remove(options.name)
    print(f"{options.name}: ended and forgotten")
