"""`fold3d cluster submit`, `round`, `status`, `cancel`: the user's own jobs on Slurm."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

from fold3d.cli.tables import columns
from fold3d.errors import ConfigError


def add(subcommands: Any) -> None:
    """Adds the subcommands to the parser."""
    made = subcommands.add_parser("submit", help="a job that may run on several kinds of GPU", description=__doc__)
    made.add_argument("name")
    made.add_argument("script", help="train.py, which torchrun starts, or a program that is run once on each node")
    made.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of the script: all behind it")
    made.add_argument("--on", action="append", required=True, metavar="KIND:NODESxGPUS", help="such as a100:1x2; again")
    made.add_argument(
        "--output", required=True, metavar="FOLDER", help="its output_dir, on storage that all nodes mount"
    )
    made.add_argument("--predicted", metavar="FILE", help="rates in tokens per second; default: as many as GPUs")
    made.add_argument("--weight", type=float, default=1.0, help="default 1")
    made.add_argument("--group", default="", help="for the policy hierarchical")
    made.add_argument("--deadline", type=float, metavar="HOURS", help="from now")
    made.set_defaults(run=run_submit)
    made = subcommands.add_parser("round", help="start, move and stop jobs by a policy", description=__doc__)
    made.add_argument("--policy", default="fair", metavar="NAME", help="default fair")
    made.add_argument("--gpus", metavar="KIND:COUNT,..", help="that jobs may have; default: all of the cluster")
    made.add_argument("--every", type=float, metavar="SECONDS", help="hold rounds for ever; else one, as cron does")
    made.add_argument("--round", type=float, metavar="SECONDS", help="between rounds of cron, default --every or 360")
    made.set_defaults(run=run_round)
    made = subcommands.add_parser("status", help="the jobs, and what each is due", description=__doc__)
    made.set_defaults(run=run_status)
    made = subcommands.add_parser("cancel", help="end a job and forget it", description=__doc__)
    made.add_argument("name")
    made.set_defaults(run=run_cancel)


def run_submit(options: argparse.Namespace) -> None:
    """Writes the job down; the next round may start it. Raises: ConfigError."""
    from fold3d.cluster.slurm.folder import Folder, Wish, parse_on

    script = Path(options.script).absolute()
    if not script.is_file():
        raise ConfigError(f"{script} is no file")
    if options.deadline is not None and not options.deadline > 0:
        raise ConfigError(f"--deadline is {options.deadline:g}; it must be positive, in hours from now")
    if not (math.isfinite(options.weight) and options.weight > 0):
        raise ConfigError(f"--weight is {options.weight:g}; it must be positive")
    now, folder = time.time(), Folder()
    wish = Wish(
        name=options.name,
        script=str(script),
        arguments=tuple(options.arguments),
        on=parse_on(options.on, Path(options.predicted) if options.predicted else None),
        output=str(Path(options.output).absolute()),
        weight=options.weight,
        group=options.group,
        deadline=math.inf if options.deadline is None else now + 3600.0 * options.deadline,
        submitted=now,
    )
    with folder.locked():
        folder.add(wish)
    print(f"{options.name}: waits for the next `fold3d cluster round`")


def run_round(options: argparse.Namespace) -> None:
    """Holds one round, or rounds for ever. Raises: ConfigError."""
    from fold3d.cluster.jobs import Cluster
    from fold3d.cluster.policies import Policy
    from fold3d.cluster.rounds import Rules
    from fold3d.cluster.slurm import commands
    from fold3d.cluster.slurm.folder import Folder
    from fold3d.cluster.slurm.moves import hold

    seconds = options.round or options.every or 360.0
    if not seconds > 0:
        raise ConfigError(f"rounds of {seconds:g} s cannot be held; --every and --round must be positive")
    policy = Policy(name=options.policy)
    while True:
        begin = time.time()
        cluster = Cluster.parse(options.gpus) if options.gpus else commands.gpus()
        _, placed, moved = hold(Folder(), policy, cluster, Rules(seconds=seconds, fill=policy.fills))
        places = ", ".join(f"{name} on {here.gpus} x {here.kind}" for name, here in sorted(placed.items()))
        print(f"{policy.label}: {places or 'nobody runs'}; {moved} started or moved", flush=True)
        if options.every is None:
            return
        time.sleep(max(0.0, options.every - (time.time() - begin)))


def run_status(options: argparse.Namespace) -> None:
    """Prints a table. Raises: ConfigError."""
    from fold3d.cluster.slurm.folder import Folder
    from fold3d.cluster.slurm.moves import look

    folder = Folder()
    state, (ledger, _) = look(folder), folder.ledger()
    rows: list[tuple[str, ...]] = [("job", "group", "weight", "state", "on", "rate", "", "owed, GPU hours")]
    for wish in folder.wishes():
        ended, here = folder.ended(wish.name), state.place_of(wish)
        rate, source = "", ""
        if here is not None:
            known = next(e for o, e in state.estimates[wish.name].items() if (o.kind, o.gpus) == (here.kind, here.gpus))
            rate, source = f"{known.rate:.4g} +- {known.error:.0%}", "measured" if known.measured else "predicted"
        owed = sum(seconds * place.gpus for place, seconds in ledger.debts.items() if wish.name in place.jobs) / 3600.0
        now = state.queued[wish.name][-1].state.lower() if wish.name in state.queued else "waiting"
        on = str(wish.place(here)) if here is not None else ""
        rows.append((wish.name, wish.group, f"{wish.weight:g}", ended or now, on, rate, source, f"{owed:.2f}"))
    print("\n".join(columns(rows)))


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
