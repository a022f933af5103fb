"""LinkTimes: how fast messages between chunks were sent in the last steps, by border and direction."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from fold3d.observe.step_breakdown import RawRecord
from fold3d.schedule import parse_action

Link = tuple[int, bool]
"""Border behind which chunk, and whether messages go forward over it."""
Traffic = dict[Link, tuple[int, float, bool]]
"""Bytes, the seconds that they took, and whether whoever received them says so."""

_LANES = {
    "send_f": (0, True, False),
    "recv_f": (-1, True, True),
    "send_b": (-1, False, False),
    "recv_b": (0, False, True),
}
"""By lane: the border seen from the chunk; whether messages go forward; whether they arrive."""


class LinkTimes:
    """Of one rank: a moving window of steps."""

    def __init__(self, steps: int) -> None:
        """Args:
        steps: of the window.
        """
        self._steps: deque[dict[tuple[Link, bool], tuple[int, int]]] = deque(maxlen=steps)

    def observe(self, records: Iterable[RawRecord]) -> None:
        """Takes in a step's records; one without messages changes nothing."""
        step: dict[tuple[Link, bool], tuple[int, int]] = {}
        for lane, text, start, end, size in records:
            if lane in _LANES and size > 0:
                behind, forward, arrives = _LANES[lane]
                key = (parse_action(text).chunk + behind, forward), arrives
                bytes_, spent = step.get(key, (0, 0))
                step[key] = bytes_ + size, spent + end - start
        if step:
            self._steps.append(step)

    def traffic(self) -> Traffic:
        """Returns what was sent in the window. A message's sender may wait for its receiver, and a sender's buffers
        take small ones at once: where this rank has received as well as sent, what it received counts."""
        whole: dict[tuple[Link, bool], tuple[int, int]] = {}
        for step in self._steps:
            for key, (size, spent) in step.items():
                before = whole.get(key, (0, 0))
                whole[key] = before[0] + size, before[1] + spent
        return {
            link: (size, max(1, spent) / 1e9, arrives)
            for (link, arrives), (size, spent) in sorted(whole.items())  # what arrives comes last, and stays
        }


def rates_of(shares: Sequence[Traffic], borders: int, otherwise: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns bytes per second over each border, forward and backward: of the slowest of several pipelines, which wait
    for each other in every step.

    Args:
        shares: of all ranks.
        otherwise: what a border has over which nothing was sent.
    """

    def rate(link: Link) -> float:
        known = [share[link] for share in shares if link in share]
        arrived = [one for one in known if one[2]] or known
        return min((size / seconds for size, seconds, _ in arrived), default=otherwise)

    forward, backward = (tuple(rate((border, way)) for border in range(borders)) for way in (True, False))
    return forward, backward
