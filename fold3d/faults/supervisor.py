"""Supervisor: what runs on one rank fails on all. It watches the ranks of a job from the moment that they know each
other (watch_job); the first engine takes it over (supervisor_of_engine).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fold3d.errors import ConfigError, Fold3dError, RankError
from fold3d.faults.diagnosis import diagnose, own_failure
from fold3d.faults.failure import FailureBoard, is_communication_error
from fold3d.faults.progress import Progress
from fold3d.faults.uncaught import is_first_to_fail, report_uncaught, swallow_repeats
from fold3d.topology import Topology


class Supervisor:
    """Tells the other ranks of failures, and stops for theirs. A rank that is alone goes on after a failure.

    Attributes:
        progress: where this rank is, for those who report it; its `life` says whether the rank may go on.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.progress = Progress()
        self._life = self.progress.life
        self._board: FailureBoard | None = None
        self._watches = self._open = False

    def watch(self, store: Any, name: str, timeout: float) -> None:
        """From now on this rank is watched, and hears of failures; all ranks of the job call, and none waits.

        Args:
            store: the job's.
            name: the same on every rank, given to no other of the store.
            timeout: seconds without a sign of life after which a rank has failed.
        """
        report_uncaught(self._topology.describe(self._topology.rank), self._topology.rank)
        self._board = FailureBoard(store, name, self._topology, timeout, self.progress)
        self._watches = True
        weakref.finalize(self, self._board.close)

    def expect(self, topology: Topology, timeout: float) -> None:
        """The engine's layout and time limit, which may be others than when the watch began."""
        self._topology = topology
        if self._board is not None:
            self._board.expect(topology, timeout)

    def open(self) -> None:
        """The engine stands: from now on all that fails on this rank is told to the others; all ranks call."""
        self._open = True

    def close(self) -> None:
        """Says goodbye to the other ranks, and hears no more of them."""
        self._watches = self._open = False
        if self._board is not None:
            self._board.close()

    @property
    def _is_lost(self) -> bool:
        """Whether the job has failed, and nobody has raised it here."""
        return self._watches and self._life.failure is not None and not self._life.is_raised

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other rank: a step that failed then leaves nobody in the middle of it."""
        return self._board is None

    @contextlib.contextmanager
    def supervise(self, doing: str, *, meets: bool = False) -> Iterator[None]:
        """Tells the other ranks when the body raises, so that they stop too; all ranks run it.

        Args:
            doing: completes "failed in ...".
            meets: the body ends only when other ranks have come to the same point.
        Raises: RankError when another rank failed or cannot be reached, else what the body raised. fold3d's own errors
            pass untold, unless one rank may be the only one to raise them (`Fold3dError.is_everywhere`); before the
            engine stands, or after its end, all errors but those of communication and exit codes do.
        """
        # Outside of an engine, where no rank waits for another, the job's store may go in good order.
        said = self.progress.during(doing, meets=meets) if self._open or meets else contextlib.nullcontext()
        with said:
            try:
                if not self._open and self._is_lost:
                    raise RankError
                yield
            except BaseException as error:
                if not self._open:
                    if isinstance(error, SystemExit) and error.code:  # of this rank alone: the others would wait
                        self.fail(error)
                    self._explain(error)
                    raise
                if isinstance(error, Fold3dError) and error.is_everywhere:
                    raise
                if self._is_alone:
                    raise
                message = self._life.failure if self._life.is_raised else self.fail(error)
                if isinstance(error, Exception) and is_communication_error(error):
                    raise RankError(message) from error
                raise

    def _explain(self, error: BaseException) -> None:
        """Raises RankError if `error`, in building an engine, comes of another rank that is gone."""
        if not self._watches or self._life.is_raised:
            return
        cause = error.__cause__ if isinstance(error, RankError) else error
        met_nobody = cause is not None and is_communication_error(cause)
        if met_nobody or (self._is_lost and isinstance(error, RankError)):
            raise RankError(self.fail(cause or error)) from cause

    @contextlib.contextmanager
    def together(self, doing: str, *, meets: bool = True) -> Iterator[None]:
        """What the body raises becomes a RankError on every rank, and so does another rank's failure meanwhile.

        Args:
            doing: completes "failed in ...".
            meets: the body ends only when other ranks have come to the same point.
        """
        with self.progress.during(doing, meets=meets):
            try:
                if self._life.failure is not None:
                    told = self.fail(RankError(self._life.failure))
                    raise RankError(told)
                yield
            except RankError:
                raise
            except BaseException as error:
                if self._life.is_closed:  # nobody can be told any more
                    if not isinstance(error, Exception):
                        raise
                    raise _closed_in(doing) from error
                message = self.fail(error)
                if not isinstance(error, Exception):
                    raise
                # fold3d's own errors say all there is to say; of others the user wants to see where they come from.
                raise RankError(message) from None if isinstance(error, Fold3dError) else error
            else:
                if self._life.is_closed:
                    raise _closed_in(doing)

    def fail(self, error: BaseException) -> str:
        """Ends communication, tells the other ranks, returns the message that every rank raises."""
        if self._board is None:
            return own_failure(error, self._topology, self.progress)
        if isinstance(error, KeyboardInterrupt):
            swallow_repeats()
        message = self._life.failure
        if message is None:
            if is_communication_error(error):
                message = diagnose(error, self._board, self._topology, self.progress)
            else:
                message = own_failure(error, self._topology, self.progress)
                is_first_to_fail(error, message)
            message = self._board.publish(message)
        self._board.raised()
        return message


def _closed_in(doing: str) -> ConfigError:
    return ConfigError(f"the engine was closed in the middle of {doing}")


# By the job's default process group, whose end is theirs.
_waiting: WeakKeyDictionary[Any, Supervisor] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[Any, itertools.count[int]] = WeakKeyDictionary()


def watch_job(topology: Topology, timeout: float) -> None:
    """From now on this rank is watched, and hears which other one is silent; all ranks call, and none waits.

    Does nothing the second time in a job, and in one of a single rank.

    Args:
        timeout: seconds without a sign of life after which a rank has failed.
    """
    if topology.world == 1 or not dist.is_initialized():
        return
    job = dist.distributed_c10d._get_default_group()
    if job not in _numbers:
        _numbers[job] = itertools.count()
        _waiting[job] = _watching(job, topology, timeout)


def supervisor_of_engine(topology: Topology, timeout: float) -> Supervisor:
    """Returns the one that has watched the job so far, for its first engine; later ones get one of their own.

    All ranks call in the same order, and none waits. Args as for `watch_job`.
    """
    if topology.world == 1 or not dist.is_initialized():
        return Supervisor(topology)
    watch_job(topology, timeout)
    job = dist.distributed_c10d._get_default_group()
    found = _waiting.pop(job, None)
    if found is None:
        return _watching(job, topology, timeout)
    found.expect(topology, timeout)
    return found


def _watching(job: Any, topology: Topology, timeout: float) -> Supervisor:
    made = Supervisor(topology)
    made.watch(dist.distributed_c10d._get_default_store(), f"watch {next(_numbers[job])}", timeout)
    return made
