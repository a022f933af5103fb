"""RecordedRun: what is known of one run, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fold3d.observe.step_breakdown import MEET, NS_PER_MS, RawRecord

if TYPE_CHECKING:
    from fold3d import _C


class RecordedRun:
    """A run, with the update that follows it, and what happened until the next one began.

    On a device its bounds are not known before the device has come to them: whoever asks waits.
    """

    def __init__(
        self, *, trains: bool, begin: _C.Moment, counted: Mapping[str, int], shards: Mapping[str, int]
    ) -> None:
        """Args:
        counted, shards: by the arbiter, and of TP.sync, before; the latter empty where nobody counts it.
        """
        self.trains, self.begin, self.counted = trains, begin, counted
        self.offload: _C.OffloadCounters | None = None
        self.records: list[RawRecord] = []
        """What is known of it."""
        self.is_told = False
        """Whether somebody has looked into it, or shall not."""
        self._shards_before = self._shards_after = shards
        self._end = begin
        self._next: _C.Moment | None = None
        self._is_settled = False

    @property
    def is_over(self) -> bool:
        """Whether the next run has begun."""
        return self._next is not None

    @property
    def is_settled(self) -> bool:
        """Whether `records` are all."""
        return self._is_settled

    @property
    def bounds(self) -> tuple[int, int]:
        """From when to when its step took, ns; with the waits of whoever read weights after it: for its DP.sync."""
        start, end = self.begin.wait(), self._end.wait()
        waited = sum(stop - begin for lane, _, begin, stop, _ in self.records if lane == "wait" and begin >= end)
        return start, end + waited

    @property
    def step_ms(self) -> float:
        """Its step's length."""
        start, end = self.bounds
        return (end - start) / NS_PER_MS

    @property
    def exposed_tp_ms(self) -> float | None:
        """For how long the rank waited for TP.sync in it; None: nobody counts it."""
        return self.shards["waited_ns"] / NS_PER_MS if self._shards_after else None

    @property
    def shards(self) -> dict[str, int]:
        """What was counted of TP.sync in it."""
        return {name: count - self._shards_before[name] for name, count in self._shards_after.items()}

    def extend(self, end: _C.Moment, shards: Mapping[str, int]) -> None:
        """What happened up to now belongs to its step."""
        self._end, self._shards_after = end, shards

    def count(self, offload: _C.OffloadCounters | None) -> None:
        """Keeps what the Offloader has counted at its end."""
        self.offload = offload

    def follow(self, begin: _C.Moment) -> None:
        """The next run begins."""
        self._next = begin

    def tell(self) -> None:
        """Somebody has looked into it, or shall not."""
        self.is_told = True

    def until(self, now: _C.Moment) -> int:
        """Returns when the next run began, or else now; ns."""
        return (now if self._next is None else self._next).wait()

    def settle(self, records: list[RawRecord]) -> None:
        """Takes more of its records: of what comes after its step waits for weights alone, not what others do."""
        end = self._end.wait()
        self.records += [record for record in records if record[:2] != ("wait", MEET) or record[2] < end]
        self._is_settled = self.is_over
