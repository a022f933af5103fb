"""search_meshes(): into how many replicas, stages and shards a number of processes is divided best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fold3d.errors import ConfigError
from fold3d.plan.job import TrainingJob
from fold3d.plan.search import Found


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


M = TypeVar("M", bound=Mesh)


@dataclass(frozen=True, slots=True)
class Tried(Generic[M]):
    """A mesh, and what the planner says of it."""

    mesh: M
    found: Found | None
    reason: str
    """Why there is no plan, or why it does not count; empty where it does."""

    @property
    def counts(self) -> bool:
        """Whether there is a plan that fits into memory."""
        return self.found is not None and not self.reason

    @property
    def step_ms(self) -> float | None:
        """Predicted milliseconds of a step; None where nothing was found, or need not be."""
        best = None if self.found is None else self.found.best
        return None if best is None else best.step_ns / 1e6


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
    for shards in [tp] if tp is not None else (n for n in range(1, ranks_per_host + 1) if ranks_per_host % n == 0):
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
    candidates: Iterable[M], job_of: Callable[[M], TrainingJob], decide: Callable[[list[TrainingJob]], list[Found]]
) -> list[Tried[M]]:
    """Returns what was tried, the best first: those that fit into memory, by the time of a step of the same global
    batch; then those that do not fit, by what they need; then those of which a bound says that they are slower; then
    those that cannot be.

    Args:
        job_of: raises ConfigError for a mesh that the model cannot have, such as shards that do not divide its heads.
        decide: see `search.decide_jobs`.
    """
    possible: list[tuple[M, TrainingJob]] = []
    found: list[tuple[tuple[float, ...], Tried[M]]] = []
    for mesh in candidates:
        try:
            possible.append((mesh, job_of(mesh)))
        except ConfigError as error:
            found.append(((3.0, float(mesh.tp), float(mesh.pp)), Tried(mesh, None, str(error))))
    plans = decide([job for _, job in possible]) if possible else []
    for (mesh, _), one in zip(possible, plans, strict=True):
        size, best = float(mesh.tp * mesh.pp), one.best
        if best is None and one.cannot:
            found.append(((3.0, float(mesh.tp), float(mesh.pp)), Tried(mesh, None, one.cannot)))
        elif best is None:
            tried = Tried(mesh, one, f"at least {one.least_ms:.1f} ms; nothing faster fits")
            found.append(((2.0, one.least_ms, size), tried))
        elif not one.fits:
            tried = Tried(mesh, one, "does not fit into memory_limit")
            found.append(((1.0, float(one.memory_bytes), best.step_ns), tried))
        else:
            found.append(((0.0, best.step_ns, size), Tried(mesh, one, "")))
    return [tried for _, tried in sorted(found, key=lambda pair: pair[0])]
