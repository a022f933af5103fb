"""`fold3d cluster`: many jobs on GPUs of several kinds."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

from fold3d.cli import cluster_jobs
from fold3d.cli.parser import picture as picture_file
from fold3d.cli.tables import columns
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.cluster.policies import Policy
    from fold3d.cluster.simulate import Report
    from fold3d.cluster.workload import Arrival, Workload

_BLIND = ":blind"


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    made = subcommands.add_parser("cluster", help="share GPUs of several kinds among jobs", description=__doc__)
    below = made.add_subparsers(metavar="COMMAND", required=True)
    _add_simulate(below)
    cluster_jobs.add(below)


def _add_simulate(subcommands: Any) -> None:
    text = "Simulates a cluster: which policy suits these jobs, and which GPUs."
    made = subcommands.add_parser("simulate", help="what a policy, or other GPUs, would do to jobs", description=text)
    made.add_argument("workload", metavar="WORKLOAD.json", help="models, their rates, and jobs; see docs/cluster.md")
    made.add_argument(
        "--gpus",
        action="append",
        required=True,
        metavar="KIND:COUNT@PRICE,..",
        help="GPUs of the cluster, prices per GPU and hour optional; repeat it to compare clusters",
    )
    made.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"policy; default fair; NAME{_BLIND} treats all kinds as equally fast; repeat it to compare policies",
    )
    made.add_argument("--budget", type=float, help="cost limit of all jobs, for the policy makespan")
    made.add_argument("--round", type=float, default=360.0, metavar="SECONDS", help="length of a round; default 360")
    made.add_argument(
        "--overhead", type=float, default=0.05, help="share of a job's time that moves may take; default 0.05"
    )
    made.add_argument("--draw", type=int, metavar="JOBS", help="number of jobs to draw from the file; with --per-hour")
    made.add_argument("--per-hour", type=float, metavar="JOBS", help="jobs that arrive per hour, with --draw")
    made.add_argument("--seeds", type=int, help="number of draws to average, with --draw; default 1")
    made.add_argument(
        *("--picture", "--png"),
        dest="picture",
        type=picture_file,
        metavar="FILE",
        help="draw times, used GPUs and fairness (of the first draw): .png, .svg or .pdf",
    )
    made.set_defaults(run=run_simulate)


def run_simulate(options: argparse.Namespace) -> None:
    """Prints a table, and draws. Raises: ConfigError for options and files that cannot work, or without scipy."""
    from fold3d.cluster import picture
    from fold3d.cluster.fields import Field
    from fold3d.cluster.jobs import Cluster
    from fold3d.cluster.rounds import Rules
    from fold3d.cluster.simulate import simulate
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
        picture.draw(shown, gpus, Path(options.picture))
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


def _row(label: str, reports: list[Report]) -> tuple[str, ...]:
    def over(value: Any) -> float:
        return mean(float(value(report)) for report in reports)

    def hours(report: Report) -> list[float]:
        return [job.seconds / 3600.0 for job in report.jobs]

    slow = over(lambda one: quantiles(hours(one), n=10)[-1] if len(one.jobs) > 1 else hours(one)[0])
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
        budget=options.budget if text == "makespan" else None,
        groups=workload.groups if name == "hierarchical" else {},
    )
