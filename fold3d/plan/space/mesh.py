"""search_meshes(): into how many replicas, stages and shards a number of processes is divided best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fold3d.errors import ConfigError
from fold3d.plan.job import Job
from fold3d.plan.proposal import Proposal


@dataclass(frozen=True, order=True, slots=True)
class Mesh:
    """The sizes of the axes, and what each replica runs of a step."""

    tp: int
    pp: int
    dp: int
    micro_batches: int

    @property
    def name(self) -> str:
        """In words."""
        return f"dp={self.dp} tp={self.tp} pp={self.pp}, {self.micro_batches} micro-batches each"


@dataclass(frozen=True, slots=True)
class Tried:
    """A mesh, and what the planner proposes for it."""

    mesh: Mesh
    proposal: Proposal | None
    reason: str
    """Why there is no proposal, or why it does not count; empty where it does."""


def meshes(
    processes: int, micro_batches: int, *, tp: int | None, pp: int | None, ranks_per_host: int, most_stages: int
) -> list[Mesh]:
    """Returns all meshes of so many processes, with fewer shards and stages first.

    Args:
        micro_batches: of a step, all replicas together; each replica runs as many.
        tp, pp: None: any. A tensor-parallel group that is not asked for stays within a host.
        ranks_per_host: processes on a host; of a group's ranks, all are on one.
        most_stages: into which the model can be cut.
    Raises: ConfigError if there is none.
    """
    found = []
    for shards in [tp] if tp is not None else _divisors(ranks_per_host):
        for stages in [pp] if pp is not None else range(1, most_stages + 1):
            replicas, rest = divmod(processes, shards * stages)
            if rest or not replicas or micro_batches % replicas:
                continue
            found.append(Mesh(tp=shards, pp=stages, dp=replicas, micro_batches=micro_batches // replicas))
    if not found:
        raise ConfigError(
            f"{processes} processes and {micro_batches} micro-batches of a step cannot be divided with "
            f"tp={tp or 'auto'} and pp={pp or 'auto'}: processes by tp*pp, micro-batches by the replicas that are left"
        )
    return found


def search_meshes(
    candidates: Iterable[Mesh], job_of: Callable[[Mesh], Job], decide: Callable[[Job], Proposal]
) -> list[Tried]:
    """Returns what was tried, the best first: those that fit into memory, by the time of a step of the same global
    batch; then those that do not fit, by what they need; then those that cannot be.

    Args:
        job_of: raises ConfigError for a mesh that the model cannot have, such as shards that do not divide its heads.
    """
    found: list[tuple[tuple[float, ...], Tried]] = []
    for mesh in candidates:
        try:
            job = job_of(mesh)
            proposal = decide(job)
        except ConfigError as error:
            found.append(((2.0, float(mesh.tp), float(mesh.pp)), Tried(mesh, None, str(error))))
            continue
        if job.memory_limit is not None and proposal.memory_bytes > job.memory_limit:
            tried = Tried(mesh, proposal, "does not fit into memory_limit")
            found.append(((1.0, float(proposal.memory_bytes), proposal.step_ms), tried))
        else:
            found.append(((0.0, proposal.step_ms, float(mesh.tp * mesh.pp)), Tried(mesh, proposal, "")))
    return [tried for _, tried in sorted(found, key=lambda pair: pair[0])]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
