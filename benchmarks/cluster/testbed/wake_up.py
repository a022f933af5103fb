"""How late this machine wakes a sleeping thread. It is taken off every layer's sleep (virtual_layer.py)."""

from __future__ import annotations

import ctypes
import os
import time
from statistics import quantiles

VARIABLE = "FOLD3D_CLUSTER_WAKE_UP_S"
"""What the ranks are told in their environment: measured once, before there are any, it is the same for all."""
_PR_SET_TIMERSLACK, _TIMER_SLACK_NS = 29, 1000
_SLEEPS, _SLEEP_S = 100, 2e-3


def wake_punctually() -> None:
    """Asks the kernel to wake this thread in time; by default it takes up to 50 us, 2 % of a forward in scenario A."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)


def measure_wake_up_s() -> float:
    """Returns by how much sleeps are longer than asked for, in seconds: the lower quartile of 0.2 s of sleeps.

    The quartile, as whatever disturbs a sleep makes it longer, and layers that are too short would flatter everybody.
    """
    wake_punctually()
    late = []
    for _ in range(_SLEEPS):
        end = time.perf_counter() + _SLEEP_S
        time.sleep(_SLEEP_S)
        late.append(time.perf_counter() - end)
    return max(0.0, quantiles(late, n=4)[0])


def wake_up_s() -> float:
    """Returns what this process was told, 0 if nothing."""
    return float(os.environ.get(VARIABLE, 0.0))
