"""diagnose(): why communication broke: what another rank told, else who is silent, else who is late; holding_up(): who
that is, by the schedule and by where each rank is, when a wait has reached its time limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from fold3d import _C
from fold3d.faults.failure import FailureBoard
from fold3d.faults.progress import Progress, Report
from fold3d.faults.uncaught import INTERRUPTED
from fold3d.schedule import Schedule, waits_for
from fold3d.topology import Topology, stage_of

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


def holding_up(schedule: Schedule, topology: Topology, run: int, reports: Mapping[int, Report]) -> list[int]:
    """Returns the ranks that `topology.rank` waits for in the end: they wait for nobody and have not finished the run.

    A rank that waits for a message waits for its sender, which may itself wait for another; one that meets others waits
    for those that are not there. The chain ends at the rank that computes for long, sleeps, or never began.

    Args:
        schedule: the lowered schedule of the run under way on `topology.rank`.
        run: its number, as in Report.run.
        reports: of all ranks that talk to each other in the run; those without a report are taken for waiting.
    """
    chain = _Chain(schedule, topology, run, reports)
    seen, todo, ends = {topology.rank}, [topology.rank], []
    while todo:
        rank = todo.pop()
        blockers = chain.blockers(rank)
        if not blockers and rank != topology.rank:
            ends.append(rank)
        todo += blockers - seen
        seen |= blockers
    return sorted(ends)


class _Chain:
    def __init__(self, schedule: Schedule, topology: Topology, run: int, reports: Mapping[int, Report]):
        self._schedule, self._topology, self._run, self._reports = schedule, topology, run, reports
        self._index = [{action.text: k for k, action in enumerate(actions)} for actions in schedule.ranks]

    def _stage(self, rank: int) -> int:
        return self._topology.coordinates(rank).pp

    def _position(self, rank: int) -> float:
        """Index of the action the rank is in: -1 before the run, infinity after it."""
        report = self._reports[rank]
        if report.run < self._run or report.closed:
            return -1.0
        if report.run > self._run or not report.action:
            return float("inf")
        return self._index[self._stage(rank)].get(report.action, float("inf"))

    def _has_passed(self, rank: int, action: _C.Action) -> bool:
        return rank not in self._reports or self._position(rank) > self._index[self._stage(rank)][action.text]

    def blockers(self, rank: int) -> set[int]:
        """Returns the ranks that have not yet done what `rank` waits for now."""
        report = self._reports.get(rank)
        if report is None or report.closed:
            return set()
        if not report.action:
            return self._absent(rank, report) if report.meets else set()
        if report.run != self._run or not 0 <= self._position(rank) < float("inf"):
            return set()
        replica, stage, shard = self._topology.coordinates(rank)
        program = self._schedule.ranks[stage]
        here = int(self._position(rank))
        waits = [need for need in waits_for(self._schedule, program[here]) if need.kind in _RECEIVES]
        others = [(replica, need) for wait in waits for need in waits_for(self._schedule, wait)]
        if here == len(program) - 1:  # the run ends when everything that was sent has arrived
            others += [(replica, self._receive(action)) for action in program if action.kind in _RECEIVER_OF]
        blockers = set()
        for other, action in others:
            peer = self._topology.rank_of(other, stage_of(action.chunk, self._topology.pp, self._topology.style), shard)
            if peer != rank and not self._has_passed(peer, action):
                blockers.add(peer)
        if not blockers and report.meets:  # nothing of the schedule keeps it: it waits for parameters
            return self._absent(rank, report)
        if not blockers:  # inside an action a rank waits for the shards of its stage that have not come to it
            shards = set(self._topology.shards(replica, stage)) & set(self._reports)
            blockers = {peer for peer in shards if self._position(peer) < here}
        return blockers

    def _absent(self, rank: int, report: Report) -> set[int]:
        """Returns those that `rank` may meet and that have not come as far, or are elsewhere in the same run; where all
        are there, those that wait with it, as one of them may meet somebody else that is not."""
        replica, stage, shard = self._topology.coordinates(rank)
        # In an action a rank meets other replicas, for their parameters, and the other shards of its stage.
        peers = {*self._topology.replicas(stage, shard), *self._topology.shards(replica, stage)}
        if not report.action:
            peers.update(self._topology.replica(replica))
        peers &= set(self._reports)
        here = (report.run, report.action, report.doing)
        others = {
            peer: (other.run, other.action, other.doing) == here
            for peer, other in self._reports.items()
            if peer in peers and peer != rank and other.run <= report.run
        }
        return {peer for peer, is_here in others.items() if not is_here} or set(others)

    @staticmethod
    def _receive(send: _C.Action) -> _C.Action:
        step = 1 if send.kind == _C.Kind.SEND_FORWARD else -1
        return _C.Action(send.chunk + step, _RECEIVER_OF[send.kind], send.micro_batch)


_RECEIVES = (_C.Kind.RECV_FORWARD, _C.Kind.RECV_BACKWARD)
_RECEIVER_OF = {
    _C.Kind.SEND_FORWARD: _C.Kind.RECV_FORWARD,
    _C.Kind.SEND_BACKWARD: _C.Kind.RECV_BACKWARD,
}
