"""diagnose(): why communication broke: what another rank told, else who is silent, else who is late."""

from __future__ import annotations

from collections.abc import Mapping

from fold3d.faults.failure import FailureBoard
from fold3d.faults.progress import Progress, Report
from fold3d.faults.stall import holding_up
from fold3d.faults.uncaught import INTERRUPTED
from fold3d.topology import Topology

_CAUSE_SECONDS = 0.5
"""How long a rank whose communication broke waits for the rank that failed to say why, before it looks around."""
_SILENT_SECONDS = 2.0
"""How long it then looks who still reports; four reports' time."""
_NAMED = 4
"""How many ranks that are late a message names."""
_ALL_RANKS = 64
"""In larger jobs a rank asks only for the reports of those it talks to."""


def own_failure(error: BaseException, topology: Topology, progress: Progress) -> str:
    """Returns what the other ranks are told of an error of this rank's."""
    name, where = topology.describe(topology.rank), progress.report().where()
    if isinstance(error, KeyboardInterrupt):
        return f"{name} {INTERRUPTED} {where}"
    return f"{name} failed {where}: {type(error).__name__}: {error}"


def diagnose(error: BaseException, board: FailureBoard, topology: Topology, progress: Progress) -> str:
    """Returns the cause of broken communication. Takes some seconds; the rank stands where `error` was raised."""
    name = topology.describe(topology.rank)
    peers = {*topology.pipeline(topology.dp_rank), *topology.replicas(topology.pp_rank)}
    peers.update(topology.shards(topology.dp_rank, topology.pp_rank))
    ranks = range(topology.world) if topology.world <= _ALL_RANKS else sorted(peers)
    told = board.cause(_CAUSE_SECONDS)
    before = {} if told else board.reports(ranks)
    told = told or board.cause(_SILENT_SECONDS)
    if told:
        return told
    reports = board.reports(ranks)
    silent = [r for r in reports if r in before and reports[r].beat == before[r].beat and r != topology.rank]
    found = [f"{topology.describe(r)} is dead or stopped, last seen {reports[r].seen()}" for r in silent]
    if not found:
        found = _uneven(reports, topology, progress.report())
    if not found:
        late = _late(reports, topology, progress)
        found = [
            f"{topology.describe(r)} does not come in time (setting comm_timeout): it is {reports[r].where()}"
            for r in late[:_NAMED]
        ]
    if not found:
        return own_failure(error, topology, progress)
    noticed = str(error).removeprefix(f"{name}: ").removeprefix(f"{name} ")
    return f"{'; '.join(found)}. Noticed by {name} {progress.report().where()}: {noticed}"


def _uneven(reports: Mapping[int, Report], topology: Topology, own: Report) -> list[str]:
    """Returns what is wrong with runs of different length, which cannot fit together."""
    others = [r for r in topology.replica(topology.dp_rank) if r in reports]
    return [
        f"{topology.describe(r)} was given {reports[r].micro_batches} micro-batches and "
        f"{topology.describe(topology.rank)} {own.micro_batches}: all stages of a replica must get the same number"
        for r in others
        if reports[r].run == own.run and reports[r].micro_batches != own.micro_batches
    ][:1]


def _late(reports: Mapping[int, Report], topology: Topology, progress: Progress) -> list[int]:
    """Returns the ranks this one waited for in vain."""
    if progress.schedule is None:
        return []
    known = {**reports, topology.rank: progress.report()}
    return holding_up(progress.schedule, topology, progress.run, known)
