"""How many configurations the simulator gets through in a second: `python -m benchmarks.simulator`.

A configuration is a schedule, a cut and a way of DP.sync; simulating one means training steps until two take the same
time. One core, with the planner's own call; schedules are generated before the clock starts, as a search keeps them.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator

from benchmarks.cluster.scenarios import SCENARIOS, Scenario
from fold3d import schedule as schedules
from fold3d.plan.cluster_model import ClusterCosts, Work
from fold3d.plan.simulator import step_ms
from fold3d.schedule import Schedule

WAYS = ("early", "zero1", "serial")


def configurations(scenario: Scenario) -> Iterator[Callable[[], float]]:
    """Returns calls that simulate one configuration each: numbers of segments, N, bandwidth and ways of DP.sync."""
    works: dict[int, Work] = {}
    made: list[Schedule] = []
    for segments in (1, 2, 4, 8):
        if segments > scenario.layers:
            continue
        for size in (scenario.pp, scenario.micro_batches):
            name = "fold" if segments > 1 else "1f1b"
            group_size = size if segments > 1 else None
            made.append(
                schedules.generate(
                    name, pp=scenario.pp, segments=segments, micro_batches=scenario.micro_batches, group_size=group_size
                )
            )
            works[segments] = Work.even(
                made[-1],
                forward=scenario.forward_s / scenario.micro_batches,
                backward=scenario.backward_s / scenario.micro_batches,
                layers=scenario.layers,
                activation_bytes=scenario.activation_bytes,
                gradient_bytes=scenario.gradient_bytes,
            )
    for speed in itertools.count(1):
        cluster = ClusterCosts(
            dp=scenario.dp, bandwidth=scenario.rate_mbit / 8 * 1e6 * (1 + speed / 1000), latency=2e-4
        )
        for schedule, way in itertools.product(made, WAYS):

            def run(schedule: Schedule = schedule, cluster: ClusterCosts = cluster, way: str = way) -> float:
                return step_ms(schedule, works[schedule.segments], cluster, dp_sync=way)

            yield run


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each scenario (default 3)")
    options = parser.parse_args()
    print("| scenario | passes of a step, largest | configurations per second |\n| --- | --- | --- |")
    for name in ("A", "B"):
        scenario = SCENARIOS[name]
        passes = 2 * scenario.pp * 8 * scenario.micro_batches
        count, begin = 0, time.perf_counter()
        for run in configurations(scenario):
            run()
            count += 1
            if time.perf_counter() - begin > options.seconds:
                break
        print(f"| {name} | {passes} | {count / (time.perf_counter() - begin):.0f} |")


if __name__ == "__main__":
    main()
