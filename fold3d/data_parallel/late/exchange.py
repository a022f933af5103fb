"""Exchange: what all ranks tell each other of a step while the next one runs, on a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from fold3d.comms.world_group import WorldGroup
from fold3d.faults.lifetime import Lifetime
from fold3d.faults.progress import Progress
from fold3d.topology import Topology

T = TypeVar("T")


class Exchange(Generic[T]):
    """One job after the other on the thread `fold3d-exchange`; all ranks begin the same ones in the same order.

    `world` and `progress` are the thread's own: other exchanges may be under way on the training thread.
    """

    def __init__(self, topology: Topology, timeout: float, life: Lifetime) -> None:
        """All ranks of the job call.

        Args:
            life: waits end when the job has failed.
        """
        self.progress = Progress(life)
        self.world = WorldGroup(topology, timeout, self.progress)
        self._thread = ThreadPoolExecutor(1, "fold3d-exchange")
        self._begun: deque[Future[T]] = deque()

    def begin(self, job: Callable[[], T]) -> None:
        """Begins a job, once those before are done."""
        self._begun.append(self._thread.submit(self._run, job))

    def _run(self, job: Callable[[], T]) -> T:
        try:
            return job()
        finally:
            self.progress.take_met()  # nobody asks for these waits: the training thread does not make them

    @property
    def begun(self) -> int:
        """How many jobs were begun that nobody has waited for."""
        return len(self._begun)

    def wait(self) -> T:
        """Returns what the first of them has returned, or raises what it has raised."""
        return self._begun.popleft().result()

    def close(self) -> None:
        """Ends the thread, after the jobs under way, and its connections."""
        self._thread.shutdown()
        self.world.close()
