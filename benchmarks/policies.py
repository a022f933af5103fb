"""Policies for many jobs on GPUs of several kinds: how long they compute, and what they do to Gavel's workload.

    python -m benchmarks.policies speed
    python -m benchmarks.policies jct --data FOLDER [--rates 4 4.8 5.6] [--seeds 3] [--move 27]
    python -m benchmarks.policies makespan --data FOLDER [--jobs 500]
    python -m benchmarks.policies cost --data FOLDER
    python -m benchmarks.policies deadline
    python -m benchmarks.policies slurm

FOLDER has gavel_throughputs.json: steps per second of Gavel's models alone on three kinds of GPU, of which there are
36 each, and two tables, `simulation` and `physical_cluster` (--table). Jobs are drawn as Gavel draws them (dissertation
5.7.1): one GPU, arrivals by a Poisson process, one of 26 types, 10^x minutes on a V100 with x between 1.5 and 3, or
between 3 and 4 for every fifth job. Rounds take 360 s.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev

from fold3d.cli.main import main as cli
from fold3d.cluster.deadline import Due, Market, mixture
from fold3d.cluster.jobs import Cluster, Job, Option
from fold3d.cluster.policies import Policy, allocate
from fold3d.cluster.rounds import Rules
from fold3d.cluster.simulate import SimulationReport, simulate
from fold3d.cluster.slurm import moves
from fold3d.cluster.slurm.folder import Folder
from fold3d.cluster.workload import Arrival

DATA = "FOLD3D_GAVEL_DATA"
"""The variable that names the folder where --data does not."""
KINDS = ("v100", "p100", "k80")
CLUSTER = "v100:36@2.48,p100:36@1.46,k80:36@0.45"
"""Prices of GCP per hour on demand, as in the dissertation's figure 5.1b."""
DAY = 86400.0

Types = Mapping[str, tuple[Option, ...]]


def types_of(folder: Path, table: str) -> Types:
    """Returns the models that were measured on one GPU, with their rates."""
    rows = json.loads((folder / "gavel_throughputs.json").read_text())["throughputs"][table]
    single = {name: ast.literal_eval(name)[0] for name in rows["v100"] if ast.literal_eval(name)[1] == 1}
    return {model: tuple(Option(kind, 1, rows[kind][key]) for kind in KINDS) for key, model in sorted(single.items())}


def drawn(types: Types, count: int, *, per_hour: float | None, seed: int, move: float = 0.0) -> list[Arrival]:
    """Returns Gavel's workload: `count` jobs, all at once where there is no rate.

    Args:
        move: seconds, half to save and half to start.
    """
    chance, names, now, jobs = random.Random(seed), sorted(types), 0.0, []
    for number in range(count):
        now += chance.expovariate(per_hour / 3600.0) if per_hour else 0.0
        model = chance.choice(names)
        exponent = chance.uniform(1.5, 3.0) if chance.random() < 0.8 else chance.uniform(3.0, 4.0)
        seconds = 60.0 * 10.0**exponent
        work = seconds * next(one.rate for one in types[model] if one.kind == "v100")
        jobs.append(
            Arrival(
                name=str(number), at=now, work=work, options=types[model], save_seconds=move / 2, start_seconds=move / 2
            )
        )
    return jobs


def speed() -> None:
    """Prints how long an allocation takes, for distinct jobs and of 26 types; GPUs are three eighths as many."""
    print("| policy | jobs | types | seconds |\n| --- | --- | --- | --- |")
    for count, kinds in ((128, None), (512, None), (2048, None), (2048, 26)):
        chance = random.Random(0)
        rates = [tuple(Option(kind, 1, chance.uniform(1, 10)) for kind in KINDS) for _ in range(kinds or count)]
        jobs = [
            Job(name=str(k), options=rates[k % len(rates)], work=chance.uniform(1, 1e4), group=str(k % 5), arrived=k)
            for k in range(count)
        ]
        cluster = Cluster.parse(",".join(f"{kind}:{count // 8}" for kind in KINDS))
        for policy in ("fair", "hierarchical", "makespan", "finish_time", "fifo"):
            seconds = []
            for _ in range(3):
                begin = time.perf_counter()
                allocate(Policy(name=policy), jobs, cluster)
                seconds.append(time.perf_counter() - begin)
            print(f"| {policy} | {count} | {kinds or count} | {min(seconds):.3f} |", flush=True)


def jct(options: argparse.Namespace, types: Types) -> None:
    """Prints the average time from arrival to end over rates of arrival, blind and aware."""
    first, last = options.window
    cluster, policies = Cluster.parse(CLUSTER), [Policy(name=options.policy, blind=blind) for blind in (True, False)]
    print(
        f"hours on average of jobs {first} to {last}, {options.policy}; moves take {options.move:g} s; {options.table}"
    )
    print("| jobs an hour | blind | aware | ratio | lost to moves, blind and aware |\n| --- | --- | --- | --- | --- |")
    for rate in options.rates:
        found: dict[bool, list[SimulationReport]] = {True: [], False: []}
        for seed in range(options.seeds):
            # More jobs keep coming until those that are looked at are done.
            jobs = drawn(types, 3 * last, per_hour=rate, seed=seed, move=options.move)
            for policy in policies:
                found[policy.blind].append(simulate(jobs, policy, cluster, looked_at=range(first, last)))
        hours = {blind: [report.mean_hours() for report in reports] for blind, reports in found.items()}
        lost = {blind: mean(report.moving for report in reports) for blind, reports in found.items()}
        ratio = mean(hours[True]) / mean(hours[False])
        cells = [f"{mean(hours[blind]):.1f} +- {pstdev(hours[blind]):.1f}" for blind in (True, False)]
        print(f"| {rate:g} | {' | '.join(cells)} | {ratio:.2f} | {lost[True]:.1%}, {lost[False]:.1%} |", flush=True)


def makespan(options: argparse.Namespace, types: Types) -> None:
    """Prints how long a batch of jobs takes under several policies."""
    print("| policy | hours until all are done | moves of a job |\n| --- | --- | --- |")
    policies = [Policy(name="fifo", blind=True), Policy(name="fair", blind=True), Policy(name="makespan", blind=True)]
    for policy in [*policies, Policy(name="fair"), Policy(name="makespan")]:
        reports = []
        for seed in range(options.seeds):
            jobs = drawn(types, options.jobs, per_hour=None, seed=seed)
            reports.append(simulate(jobs, policy, Cluster.parse(CLUSTER)))
        hours = [report.seconds / 3600.0 for report in reports]
        moves = mean(job.moves for report in reports for job in report.jobs)
        print(f"| {policy.label} | {mean(hours):.1f} +- {pstdev(hours):.1f} | {moves:.0f} |", flush=True)


def cost(options: argparse.Namespace, types: Types) -> None:
    """Prints what a batch of ResNet-50 and A3C jobs costs, where each may have any GPU, and who misses its deadline."""
    some = [[name for name in types if model in name] for model in ("ResNet-50", "A3C")]
    cluster = Cluster.parse(
        ",".join(f"{kind.name}:{options.jobs}@{kind.price}" for kind in Cluster.parse(CLUSTER).kinds)
    )
    print("| policy | deadlines are told | cost | late |\n| --- | --- | --- | --- |")
    for name, told in (("throughput", False), ("cost", False), ("cost", True)):
        costs, late = [], []
        for seed in range(options.seeds):
            chance, jobs, deadlines = random.Random(seed), [], {}
            for number in range(options.jobs):
                model = chance.choice(chance.choice(some))
                seconds = chance.choice([0.5, 1.0, 2.0, 4.0, 8.0]) * DAY
                deadlines[str(number)] = seconds * chance.choice([1.2, 2.0, 10.0])
                job = Arrival(name=str(number), at=0.0, work=seconds * types[model][0].rate, options=types[model])
                jobs.append(replace(job, deadline=deadlines[job.name]) if told else job)
            report = simulate(jobs, Policy(name=name), cluster, Rules(seconds=1800.0, fill=Policy(name=name).fills))
            costs.append(report.cost)
            late.append(mean(job.seconds > deadlines[job.name] for job in report.jobs))
        print(f"| {name} | {'yes' if told else 'no'} | {mean(costs):.0f} | {mean(late):.1%} |", flush=True)


def deadline() -> None:
    """Prints what 48 hours of work cost with spot machines at a third of the price, over availability and deadline."""
    print("| up, h | down, h | deadline, h | greedy | uniform progress | late, of 1,000 |")
    print("| --- | --- | --- | --- | --- | --- |")
    ratios = []
    for up, down in ((24.0, 1.0), (8.0, 2.0), (4.0, 4.0), (2.0, 8.0)):
        market = Market(price=3.0, spot=1.0, up=up, down=down)
        for hours in (50.0, 55.0, 60.0, 72.0, 96.0):
            due = Due(work=48.0, deadline=hours, restart=0.1)
            made = [mixture(due, market, uniform=uniform) for uniform in (False, True)]
            cells = [f"{one.dollars / (48.0 * market.price):.2f}" for one in made]
            late = ", ".join(f"{1000 * one.late:.0f}" for one in made)
            ratios.append(made[1].dollars / made[0].dollars)
            print(f"| {up:g} | {down:g} | {hours:g} | {' | '.join(cells)} | {late} |", flush=True)
    print(f"uniform progress costs {mean(ratios):.3f} of greedy on average, {min(ratios):.2f} to {max(ratios):.2f}")


SLEEPERS = ((600, 0.0), (300, 0.0), (400, 0.0), (200, 20.0), (500, 20.0), (240, 40.0))
"""Steps of the jobs on Slurm, and seconds after which they come."""
STEP = {"a100": 0.1, "t4": 0.3}
"""Seconds of a step."""


def on_slurm(options: argparse.Namespace) -> None:
    """Prints when six jobs that sleep are done on a real Slurm of this machine, and in the simulator.

    Three places, of two GPUs each; rounds of 20 seconds. Needs root and Debian's packages (tests/helpers/slurm.py).
    """
    from tests.helpers.slurm import slurm

    rules, cluster = Rules(seconds=20.0), Cluster.parse("a100:2,t4:4")
    toy = Path(__file__).parents[1] / "tests" / "cluster" / "slurm" / "toy"
    with tempfile.TemporaryDirectory() as name, slurm(Path(name) / "slurm"):
        place = Path(name)
        os.environ["FOLD3D_CLUSTER"] = str(place / "jobs")
        predicted = place / "predicted.json"
        rates = [{"kind": kind, "gpus": 2, "rate": 1.0 / seconds} for kind, seconds in STEP.items()]
        predicted.write_text(json.dumps({"rates": rates}))
        folder, begin, held = Folder(), time.time(), 0
        waiting, done = dict(enumerate(SLEEPERS)), dict[int, float]()
        while len(done) < len(SLEEPERS):
            for job, (steps, at) in list(waiting.items()):
                if at <= time.time() - begin + 0.01:
                    words = ["cluster", "submit", str(job), "--on", "a100:1x2", "--on", "t4:1x2"]
                    words += ["--predicted", str(predicted), "--output", str(place / str(job))]
                    cli([*words, str(toy), str(steps), "0", *(f"{kind}={sec}" for kind, sec in STEP.items())])
                    del waiting[job]
            moves.hold(folder, Policy(name=options.policy), cluster, rules)
            held += 1
            time.sleep(max(0.0, begin + held * rules.seconds - time.time()))
            over = {job: place / str(job) / "over" for job in range(len(SLEEPERS))}
            done = {job: path.stat().st_mtime - begin - SLEEPERS[job][1] for job, path in over.items() if path.exists()}
    made = tuple(Option(kind, 2, 1.0 / seconds) for kind, seconds in STEP.items())
    jobs = [
        Arrival(name=str(job), at=at, work=float(steps), options=made, start_seconds=options.move)
        for job, (steps, at) in enumerate(SLEEPERS)
    ]
    report = simulate(jobs, Policy(name=options.policy), cluster, rules)
    print("| job | steps | comes | Slurm, s | simulator, s |\n| --- | --- | --- | --- | --- |")
    for job, (steps, at) in enumerate(SLEEPERS):
        print(f"| {job} | {steps} | {at:g} | {done[job]:.1f} | {report.jobs[job].seconds:.1f} |")
    real, simulated = mean(done.values()), mean(job.seconds for job in report.jobs)
    print(f"on average {real:.1f} s and {simulated:.1f} s: {simulated / real - 1:+.1%}")


def main() -> None:
    """Runs one of the above."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("what", choices=("speed", "deadline", "slurm", "jct", "makespan", "cost"))
    made.add_argument("--data", default=os.environ.get(DATA), help=f"folder; default ${DATA}")
    made.add_argument("--table", default="simulation", choices=("simulation", "physical_cluster"))
    made.add_argument("--policy", default="fair")
    made.add_argument("--rates", type=float, nargs="+", default=[4.0, 4.8, 5.6], metavar="PER_HOUR")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--move", type=float, default=0.0, metavar="SECONDS")
    made.add_argument("--window", type=int, nargs=2, default=(4000, 5000), metavar=("FIRST", "LAST"))
    made.add_argument("--jobs", type=int, default=500)
    options = made.parse_args()
    if options.what in ("speed", "deadline", "slurm"):
        {"speed": speed, "deadline": deadline, "slurm": lambda: on_slurm(options)}[options.what]()
        return
    if not options.data:
        made.error(f"where is gavel_throughputs.json? Say --data FOLDER, or set {DATA}")
    {"jct": jct, "makespan": makespan, "cost": cost}[options.what](options, types_of(Path(options.data), options.table))


if __name__ == "__main__":
    main()
