"""Policies: how the time of GPUs of several kinds is divided among jobs.

Each is a linear program or a few of them, over the part of the time that a job spends on each of its options, as in
chapter 5 of the dissertation (Gavel, OSDI 2020). Nothing here has a state or looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fold3d.cluster.jobs import Allocation, Cluster, Job, Pair, blind, spread
from fold3d.cluster.policies import goals
from fold3d.cluster.policies.fair import Group, fair_weights, group_weights, water_fill
from fold3d.cluster.policies.program import Program
from fold3d.errors import ConfigError

POLICIES = {
    "fair": "the least throughput is as large as can be, by weights; then the second least, and so on",
    "hierarchical": "groups share by weight, their jobs share what the group has: fair or first in, first out",
    "finish_time": "nobody ends much later than with an equal part of the cluster for itself (Themis)",
    "makespan": "all jobs are done soonest; under a budget, if one is given",
    "throughput": "most work in all",
    "cost": "least money, with deadlines met",
    "fifo": "who came first goes first",
    "shortest": "who is done soonest goes first",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A policy with its settings."""

    name: str
    """One of POLICIES."""
    blind: bool = False
    """Whether it treats all kinds of GPU as equally fast, like schedulers that ignore kinds; for comparison."""
    budget: float | None = None
    """For `makespan`: most that all the work left may cost, in the unit of the prices. None: no limit."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    """For `hierarchical`: groups by name. Others have weight 1 and are fair inside."""
    pairs: tuple[Pair, ...] = ()
    """For `fair`: which jobs may run beside each other on the same GPUs."""

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ConfigError(f"{self.name!r} is no policy; these are: {', '.join(POLICIES)}")
        for setting, given, policy in (
            ("budget", self.budget is not None, "makespan"),
            ("groups", bool(self.groups), "hierarchical"),
            ("pairs", bool(self.pairs), "fair"),
        ):
            if given and self.name != policy:
                raise ConfigError(f"{setting} has no effect with the policy {self.name}; it is for {policy}")
        if self.budget is not None and not 0.0 <= self.budget < math.inf:
            raise ConfigError(f"the budget is {self.budget:g}; it must be a finite number, 0 or more")
        if self.blind and (self.pairs or self.name == "cost" or self.budget is not None):
            raise ConfigError("a policy that is blind to kinds knows neither their prices nor pairs; remove blind")

    @property
    def fills(self) -> bool:
        """Whether GPUs that are left over should go to some job: not if the policy saves money."""
        return self.name != "cost" and self.budget is None

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.name}, blind" if self.blind else self.name


def allocate(policy: Policy, jobs: Sequence[Job], cluster: Cluster) -> Allocation:
    """Returns what part of the time each job has on which kind and number of GPUs. Deterministic.

    Raises: JobError for a job that runs nowhere, or of which the policy must know more (such as its work left);
        ConfigError without scipy.
    """
    if not jobs:
        return Allocation(())
    seen = blind(jobs, cluster) if policy.blind else jobs
    program = Program(seen, cluster, policy.pairs)
    late: tuple[str, ...] = ()
    if policy.name == "fair":
        found = water_fill(program, fair_weights(jobs))
    elif policy.name == "hierarchical":
        found = water_fill(program, group_weights(jobs, policy.groups))
    elif policy.name == "finish_time":
        found = goals.finish_time(program, seen, cluster)
    elif policy.name == "makespan":
        found = goals.makespan(program, seen, policy.budget)
    elif policy.name == "throughput":
        found = goals.throughput(program)
    elif policy.name == "cost":
        found, late = goals.cost(program, seen)
    else:
        found = goals.ordered(program, seen, shortest=policy.name == "shortest")
    shares = program.shares(found)
    if policy.blind:
        shares = spread(shares, jobs, cluster)
    return Allocation(shares, late)
