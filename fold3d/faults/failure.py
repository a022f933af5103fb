"""FailureBoard: how the ranks of a job learn that one of them failed, died or stopped, and end with one message."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from fold3d import _C
from fold3d.faults.progress import Progress, Report
from fold3d.faults.uncaught import EXIT_STATUS, is_interruption
from fold3d.topology import Topology

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_SECONDS = 0.25
_RANKS_PER_LOOK = 128
"""More ranks look less often, so that the store has no more to do."""
_ANSWER_SECONDS = 3.0
"""How long a rank that fails waits for the store."""
_LINGER_SECONDS = 2.0
"""How long the process that keeps the store waits for the others to read why the job fails."""
_PAUSE_SECONDS = 2.0
"""A thread of ours that slept this much longer than asked was itself stopped, or held up by the store."""
_GRACE_SECONDS = 5.0
"""How long a rank may stay in a blocking call once the job has failed."""
_GRACE_AFTER_INTERRUPT_SECONDS = 1.0
"""The same once somebody pressed Ctrl-C."""
_UNINTERRUPTIBLE = ("torch.distributed", "fold3d.checkpoint", "fold3d.comms", "fold3d.profile")
"""Modules whose blocking calls nothing ends but their own time limit, which may be an hour."""


class FailureBoard:
    """The first failure of a job and each rank's last sign of life, kept in the job's store.

    Every rank makes one with the same `name`, and is watched from its first sign of life on: how long it may take until
    then is known to those who wait for it. Signs of life come from a thread that needs no GIL (`_C.Heartbeat`). One
    thread talks to the store: it looks for a failure, tells this rank's progress, and watches the next rank; whoever
    gives no sign of life for `timeout` seconds has failed. A second thread never blocks: it notices when the store
    itself no longer answers, and ends the process when the job has failed but the rank stays in a collective that
    cannot be interrupted. Making one waits for nobody but the store, and for that some seconds at most.

    On the first failure it hears of, it ends the `life` of `progress` with the message.
    """

    def __init__(self, store: Any, name: str, topology: Topology, timeout: float, progress: Progress):
        self._topology, self._timeout, self._progress, self._life = topology, timeout, progress, progress.life
        self._shared = self._store = store
        self._process = os.getpid()
        self._prefix = f"fold3d/{name}"
        self._period = _LOOK_SECONDS * max(1.0, topology.world / _RANKS_PER_LOOK)
        self._trainer = threading.get_ident()
        self._known = threading.Event()
        self._closed = threading.Event()
        self._contact = time.monotonic()
        self._lost_at: float | None = None
        self._watched = self._after(topology.rank)
        self._seen = (-1, self._contact)
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        period, report = 2 * self._period, self._progress.report().text()
        self._heart = _C.Heartbeat(store, self._key(topology.rank), period, report)
        self._talker = threading.Thread(target=self._talk, name="fold3d-board", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="fold3d-watch", daemon=True)
        self._talker.start()
        self._watcher.start()

    # For the thread that trains

    def expect(self, topology: Topology, timeout: float) -> None:
        """The layout, and how long a rank may be silent, are known better than when this was made."""
        self._topology, self._timeout = topology, timeout

    def publish(self, message: str) -> str:
        """Writes this rank's failure, unless another rank was first; returns the first one."""
        if self._life.failure is not None:
            return self._life.failure
        try:
            self._ask(lambda: self._write(message))
        except Exception as error:
            logger.warning("could not tell the other ranks why this one failed: %s", str(error) or type(error).__name__)
            self._learn(message)
        return self._life.failure or message

    def cause(self, seconds: float) -> str | None:
        """Returns the first failure of the job, waiting `seconds` for its author to write it; None if nobody did."""
        self._known.wait(seconds)
        return self._life.failure

    def reports(self, ranks: Iterable[int]) -> dict[int, Report]:
        """Returns the last reports of those `ranks` that made one; none when the store does not answer."""
        wanted = list(ranks)
        try:
            return self._ask(lambda: self._read(wanted))
        except Exception:
            return {}

    def raised(self) -> None:
        """The failure is about to be raised on this rank: what it does next is no longer this board's business."""
        self._life.raised()
        if self._keeps_store():
            # The store ends with this process: give the others the time to read it.
            deadline = time.monotonic() + _LINGER_SECONDS
            with contextlib.suppress(Exception):
                while self._ask(lambda: self._store.add(self._key("readers"), 0)) < self._topology.world:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_LOOK_SECONDS / 5)

    def close(self) -> None:
        """Says goodbye and stops watching. Tells the others first when an uncaught exception ends this process."""
        if self._closed.is_set() or os.getpid() != self._process:  # a forked child has nothing to say
            return
        error = getattr(sys, "last_value", None)  # what nobody caught; set when the interpreter has printed it
        if error is not None and self._life.failure is None and not hasattr(sys, "ps1"):
            rank = self._topology.describe(self._topology.rank)
            self.publish(f"{rank} ended its process: {type(error).__name__}: {error}")
            self.raised()
        self._heart.close(self._progress.report(closed=True).text())
        self._closed.set()
        self._requests.put((lambda: None, Future()))  # wakes the thread, if it has not ended yet
        for thread in (self._talker, self._watcher):
            if thread is not threading.current_thread():  # the garbage collector may close an engine on any thread
                thread.join(timeout=_ANSWER_SECONDS + 1.0)  # left in the store, it would abort the process at its end

    def _ask(self, request: Callable[[], T], seconds: float = _ANSWER_SECONDS) -> T:
        """Returns what `request` returns on the store's thread. The store may block for ever, this call does not."""
        if not self._talker.is_alive():
            raise ConnectionError(f"the job's store is gone: {self._keeper()}, has ended")
        if threading.current_thread() is self._talker:
            return request()
        answer: Future[T] = Future()
        self._requests.put((request, answer))
        return answer.result(timeout=seconds)

    # The store's thread

    def _talk(self) -> None:
        turn, due = 0, time.monotonic()
        while self._store is self._shared and not self._closed.is_set():
            try:
                self._store = _own_connection(self._shared)
                break
            except dist.DistError:
                self._closed.wait(self._period)
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                request, answer = self._requests.get(timeout=self._period)
                try:
                    answer.set_result(request())
                except Exception as error:
                    answer.set_exception(error)
            now = time.monotonic()
            if now < due:
                continue
            if now > due + _PAUSE_SECONDS:
                self._seen = (self._seen[0], now)  # nothing was seen meanwhile: that says nothing about the others
            due = now + self._period
            turn += 1
            try:
                self._look()
                if turn % 2 == 0:
                    self._heart.say(self._progress.report().text())
                    self._look_at_next()
            except dist.DistStoreError as error:  # late with an answer, not gone: `_judge_store` counts the seconds
                logger.debug("the job's store does not answer: %s", error)
                continue
            except Exception as error:
                logger.debug("the job's store is gone: %s", error)
                self._lost_at = time.monotonic()
                return
            self._contact = time.monotonic()

    def _key(self, what: str | int) -> str:
        return f"{self._prefix}/{what}"

    def _read(self, ranks: Iterable[int]) -> dict[int, Report]:
        written = [rank for rank in ranks if self._store.check([self._key(rank)])]
        if not written:
            return {}
        texts = self._store.multi_get([self._key(rank) for rank in written])
        return {rank: Report.parse(text) for rank, text in zip(written, texts, strict=True)}

    def _write(self, message: str) -> None:
        self._learn(self._store.compare_set(self._key("failure"), "", message).decode())
        self._store.add(self._key("readers"), 1)

    def _look(self) -> None:
        if self._life.failure is None and self._store.check([self._key("failure")]):
            self._learn(self._store.get(self._key("failure")).decode())
            self._store.add(self._key("readers"), 1)

    def _after(self, rank: int) -> int:
        return (rank + 1) % self._topology.world

    def _look_at_next(self) -> None:
        while self._watched != self._topology.rank:
            report = self._read([self._watched]).get(self._watched)
            if report is None:
                return
            if report.closed:
                self._watched, self._seen = self._after(self._watched), (-1, time.monotonic())
                continue
            silent = time.monotonic() - self._seen[1]
            if report.beat != self._seen[0]:
                self._seen = (report.beat, time.monotonic())
            elif silent > self._timeout and self._life.failure is None:
                self._write(
                    f"{self._topology.describe(self._watched)} has given no sign of life for {silent:.1f} s (setting "
                    f"comm_timeout): its process is dead or stopped, or its host cannot be reached; last seen "
                    f"{report.seen()}. "
                    f"Noticed by {self._topology.describe(self._topology.rank)} {self._progress.report().where()}"
                )
            return

    def _learn(self, message: str) -> None:
        self._life.fail(message)
        self._known.set()

    # The thread that never blocks

    def _watch(self) -> None:
        # Frames hold the step's tensors: only that of a blocking call is kept, and until the next look.
        place: tuple[FrameType, int] | None = None
        blocked: tuple[FrameType, int] | None = None
        now = since = failed = time.monotonic()
        told = False
        while not self._closed.wait(_LOOK_SECONDS):
            before, now = now, time.monotonic()
            if now > before + _PAUSE_SECONDS:
                self._contact = now
            self._judge_store(now)
            if self._life.failure is None or self._life.is_raised:
                place = blocked = None
                failed = now
                continue
            place = self._blocking_place()
            if place is None or place != blocked:
                blocked, since = place, now
            elif is_interruption(self._life.failure) and now - since > _GRACE_AFTER_INTERRUPT_SECONDS:
                self._end_process_quietly()
            elif now - since > _GRACE_SECONDS:
                self._end_process("".join(traceback.format_stack(place[0])))
            if self._life.failure is not None and not told and now - failed > _GRACE_SECONDS:
                told = True  # the script does something else, and may for hours: nothing raises the failure so far
                logger.error("the job has failed: %s", self._life.failure)

    def _blocking_place(self) -> tuple[FrameType, int] | None:
        """Returns where the thread that trains stands, if that is a call that nothing ends."""
        frame = sys._current_frames().get(self._trainer)
        if frame is None or not str(frame.f_globals.get("__name__", "")).startswith(_UNINTERRUPTIBLE):
            return None
        return frame, frame.f_lasti

    def _judge_store(self, now: float) -> None:
        silent = now - self._contact
        if self._life.failure is not None or (self._lost_at is None and silent <= self._timeout):
            return
        if self._lost_at is None:
            self._learn(
                f"the job's store has not answered for {silent:.1f} s (setting comm_timeout): {self._keeper()}, is "
                "stopped or cannot be reached"
            )
        elif self._progress.doing and now - self._lost_at > 1.0:
            # Not at once, and not outside: ranks that have finished in good order need not end at the same moment.
            self._learn(f"the job's store is gone: {self._keeper()}, has ended")

    def _keeper(self) -> str:
        if launcher_keeps_store():
            return f"the launcher on {os.environ.get('MASTER_ADDR', 'the first host')}, which keeps it"
        return f"{self._topology.describe(0)}, which keeps it"

    def _keeps_store(self) -> bool:
        return self._topology.rank == 0 and not launcher_keeps_store()

    def _end_process(self, stack: str) -> None:
        rank = self._topology.describe(self._topology.rank)
        sys.stderr.write(
            f"fold3d: {rank} ends its process. The job has failed: {self._life.failure}\nThis rank was blocked for "
            f"{_GRACE_SECONDS:.0f} s in a call that cannot be interrupted:\n{stack}"
        )
        sys.stderr.flush()
        os._exit(1)

    def _end_process_quietly(self) -> None:
        sys.stderr.write(f"fold3d: {self._topology.describe(self._topology.rank)} stops: {self._life.failure}\n")
        sys.stderr.flush()
        os._exit(EXIT_STATUS)


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` says that another rank could not be reached: its cause is to be looked for elsewhere."""
    if isinstance(error, (_C.CommError, dist.DistError)):
        return True
    return type(error) is RuntimeError and re.search(r"\bgloo\b", str(error), re.IGNORECASE) is not None


def _own_connection(store: Any) -> Any:
    # The store's other users may block it for as long as they wait.
    try:
        own = store.clone()
        own.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
    except dist.DistError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError):
        return store
    return own


def launcher_keeps_store() -> bool:
    """Whether the job's store outlives its processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
