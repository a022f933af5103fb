"""`fold3d cluster`: many jobs on GPUs of several kinds."""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

from fold3d.cli.schedules import picture
from fold3d.cli.tables import columns
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.cluster.policies import Policy
    from fold3d.cluster.simulate import SimulationReport
    from fold3d.cluster.workload import Arrival, Workload


_BLIND = ":blind"


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    command = subcommands.add_parser("cluster", help="share GPUs of several kinds among jobs", description=__doc__)
    below = command.add_subparsers(metavar="COMMAND", required=True)
    _add_simulate(below)
    _add_jobs(below)


def _add_simulate(subcommands: Any) -> None:
    text = "Simulates a cluster: which policy suits these jobs, and which GPUs."
    command = subcommands.add_parser(
        "simulate", help="what a policy, or other GPUs, would do to jobs", description=text
    )
    number, integer = (partial(command.add_argument, type=kind) for kind in (float, int))
    command.add_argument("workload", metavar="WORKLOAD.json", help="models, their rates, and jobs; see docs/cluster.md")
    command.add_argument(
        "--gpus",
        action="append",
        required=True,
        metavar="KIND:COUNT@PRICE,..",
        help="GPUs of the cluster, prices per GPU and hour optional; repeat it to compare clusters",
    )
    command.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"policy; default fair; NAME{_BLIND} treats all kinds as equally fast; repeat it to compare policies",
    )
    number("--budget", help="cost limit of all jobs, for the policy makespan")
    number("--round", default=360.0, metavar="SECONDS", help="length of a round; default 360")
    number("--overhead", default=0.05, help="share of a job's time that moves may take; default 0.05")
    integer("--draw", metavar="JOBS", help="number of jobs to draw from the file; with --per-hour")
    number("--per-hour", metavar="JOBS", help="jobs that arrive per hour, with --draw")
    integer("--seeds", help="number of draws to average, with --draw; default 1")
    command.add_argument(
        *("--picture", "--png"),
        dest="picture",
        type=picture,
        metavar="FILE",
        help="draw times, used GPUs and fairness (of the first draw): .png, .svg or .pdf",
    )
    command.set_defaults(run=run_simulate)


def run_simulate(options: argparse.Namespace) -> None:
    """Prints a table, and draws. Raises: ConfigError for options and files that cannot work, or without scipy."""
    from fold3d.cluster.fields import Field
    from fold3d.cluster.jobs import Cluster
    from fold3d.cluster.rounds import Rules
    from fold3d.cluster.simulate import draw, simulate
    from fold3d.cluster.workload import read

    seconds = Field(options.round, "--round").number(above=0.0, unit="in seconds")
    if not 0 < options.overhead < 1:
        raise ConfigError(f"--overhead is {options.overhead:g}; it is a part: above 0, below 1")
    workload = read(Path(options.workload))
    draws = _draws(options, workload)
    policies = [_policy(name, options, workload) for name in options.policy or ["fair"]]
    if options.budget is not None and all(policy.budget is None for policy in policies):
        raise ConfigError(f"--budget {options.budget:g} has no effect without --policy makespan")
    shown, gpus = {}, {}
    rows: list[tuple[str, ...]] = [_HEADER]
    for text in options.gpus:
        cluster = Cluster.parse(text)
        for policy in policies:
            rules = Rules(seconds=seconds, overhead=options.overhead, fill=policy.fills)
            reports = [simulate(jobs, policy, cluster, rules) for jobs in draws]
            label = policy.label if len(options.gpus) == 1 else f"{policy.label}; {text}"
            shown[label], gpus[label] = reports[0], cluster.gpus
            rows.append(_row(label, reports))
    jobs = f"{len(draws[0])} jobs" if len(draws) == 1 else f"{len(draws[0])} jobs, drawn {len(draws)} times"
    print(f"{jobs}; hours from arrival to end; rounds of {seconds:g} s")
    print("\n".join(columns(rows)))
    if options.picture is not None:
        draw(shown, gpus, Path(options.picture))
        print(options.picture)


_HEADER = (
    "policy",
    "mean",
    "median",
    "slowest 10 %",
    "all done",
    "used",
    "fairness",
    "worst",
    "moves",
    "lost",
    "cost",
    "late",
)


def _row(label: str, reports: list[SimulationReport]) -> tuple[str, ...]:
    def over(value: Any) -> float:
        return mean(float(value(report)) for report in reports)

    def hours(report: SimulationReport) -> list[float]:
        return [job.seconds / 3600.0 for job in report.jobs]

    slow = over(lambda one: quantiles(hours(one), n=10, method="inclusive")[-1] if len(one.jobs) > 1 else hours(one)[0])
    used = "/".join(f"{over(lambda one, kind=kind: one.used[kind]):.0%}" for kind in reports[0].used)
    return (
        label,
        f"{over(lambda one: one.mean_hours()):.2f}",
        f"{over(lambda one: median(hours(one))):.2f}",
        f"{slow:.2f}",
        f"{over(lambda one: one.seconds / 3600.0):.1f}",
        used,
        f"{over(lambda one: mean(job.fairness for job in one.jobs)):.2f}",
        f"{over(lambda one: max(job.fairness for job in one.jobs)):.2f}",
        f"{over(lambda one: mean(job.moves for job in one.jobs)):.1f}",
        f"{over(lambda one: one.moving):.1%}",
        f"{over(lambda one: one.cost):.0f}",
        f"{over(lambda one: sum(job.late for job in one.jobs)):.0f}",
    )


def _draws(options: argparse.Namespace, workload: Workload) -> list[tuple[Arrival, ...]]:
    """Returns the jobs of each simulation."""
    if options.draw is None:
        for name, value in (("--per-hour", options.per_hour), ("--seeds", options.seeds)):
            if value is not None:
                raise ConfigError(f"{name} {value:g} has no effect without --draw: the jobs are those of the file")
        return [workload.jobs]
    if options.per_hour is None:
        raise ConfigError(f"--draw {options.draw} needs --per-hour: how many of them come in an hour")
    seeds = 1 if options.seeds is None else options.seeds
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; it must be at least 1")
    return [workload.draw(count=options.draw, per_hour=options.per_hour, seed=seed) for seed in range(seeds)]


def _policy(text: str, options: argparse.Namespace, workload: Workload) -> Policy:
    from fold3d.cluster.policies import Policy

    name = text.removesuffix(_BLIND)
    return Policy(
        name=name,
        blind=text.endswith(_BLIND),
        budget=options.budget if name == "makespan" else None,
        groups=workload.groups if name == "hierarchical" else {},
    )


_OF_JOBS = "`fold3d cluster submit`, `round`, `status`, `cancel`: the user's own jobs on Slurm."
_LONGEST_ROUND = 366 * 86400.0
"""Seconds of a round: a year."""


def _add_jobs(subcommands: Any) -> None:
    """Adds the subcommands to the parser."""
    command = subcommands.add_parser(
        "submit", help="add a job that can run on several kinds of GPU", description=_OF_JOBS
    )
    command.add_argument("name")
    command.add_argument("script", help="train.py, started by torchrun, or a program that is run once per node")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the script")
    command.add_argument(
        "--on",
        action="append",
        required=True,
        metavar="KIND:NODESxGPUS",
        help="where it can run, such as a100:1x2; may be repeated",
    )
    command.add_argument(
        "--output", required=True, metavar="FOLDER", help="output_dir of the job, on storage that all nodes mount"
    )
    command.add_argument(
        "--predicted",
        metavar="FILE",
        help="file with predicted rates in tokens per second; default: proportional to GPUs",
    )
    command.add_argument("--weight", type=float, default=1.0, help="weight in the policy; default 1")
    command.add_argument("--group", default="", help="group, for the policy hierarchical")
    command.add_argument("--deadline", type=float, metavar="HOURS", help="deadline in hours from now")
    command.set_defaults(run=run_submit)
    command = subcommands.add_parser("round", help="start, move and stop jobs by a policy", description=_OF_JOBS)
    command.add_argument("--policy", default="fair", metavar="NAME", help="policy; default fair")
    command.add_argument("--gpus", metavar="KIND:COUNT,..", help="GPUs that jobs may use; default: all of the cluster")
    command.add_argument(
        "--every", type=float, metavar="SECONDS", help="repeat rounds at this interval; default: one round, for cron"
    )
    command.add_argument(
        "--round", type=float, metavar="SECONDS", help="time between rounds of cron; default --every or 360"
    )
    command.set_defaults(run=run_round)
    command = subcommands.add_parser("status", help="list the jobs and what each is owed", description=_OF_JOBS)
    command.set_defaults(run=run_status)
    command = subcommands.add_parser("cancel", help="end a job and forget it", description=_OF_JOBS)
    command.add_argument("name")
    command.set_defaults(run=run_cancel)


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
        Field(value, name).number(above=0.0, most=_LONGEST_ROUND, unit="in seconds")
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
        nobody = "no other job runs" if held.left_out else "no job runs"
        print(f"{policy.label}: {places or nobody}; {held.moved} started or moved", flush=True)

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
