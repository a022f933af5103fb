"""One rank of the cluster: `python -m benchmarks.cluster.on_rank.worker RANK WORLD PARENT DEVICE`.

Started by session.py.

It reads one JSON object per line from standard input, each a run of one system, and answers each with one line.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.cluster.on_rank.answering import answer_requests
from benchmarks.cluster.testbed.machine import core_ticks
from benchmarks.cluster.testbed.wake_up import wake_punctually

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ends this process when `parent` ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def sent_bytes(interface: str) -> int | None:
    """Returns the bytes this host has sent; None on the loopback interface, which all ranks share."""
    if interface == "lo":
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise RuntimeError(f"no interface {interface!r} in /proc/self/net/dev")


class Asleep:
    """For how long the calling thread waited for something, other than a core, since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float:
        """Returns that as a share of the time since then."""
        clock, awake = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, 1 - awake / clock)

    @staticmethod
    def _now() -> tuple[int, int]:
        ran, wanted_core, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
        return time.monotonic_ns(), int(ran) + int(wanted_core)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs warm-up and measured steps of one system back to back; returns this rank's result.

    There is no barrier between steps, the warm-up's included: a step may begin while the one before communicates.
    """
    import torch.distributed as dist

    from benchmarks.cluster.on_rank.make_rank import make_rank
    from benchmarks.cluster.scenarios import Scenario
    from benchmarks.cluster.systems import find_system

    scenario = Scenario(**request["scenario"])
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    dist.barrier()  # nobody still measures the system before
    system = make_rank(find_system(request["system"], scenario), scenario)
    watched = Path(request["progress"]) if request["progress"] and dist.get_rank() == 0 else None
    for done in range(request["warm_up"]):
        system.step()
        if watched is not None:
            watched.write_text(str(done + 1))
    system.warmed_up()
    sent_before = sent_bytes(interface)
    busy_before, stolen_before = core_ticks()
    asleep = Asleep()
    ends = [time.monotonic_ns()]
    for _ in range(request["steps"]):
        system.step()
        ends.append(time.monotonic_ns())
        if watched is not None:
            watched.write_text(str(request["warm_up"] + len(ends) - 1))
    asleep_share = asleep.share()
    busy, stolen = core_ticks()
    sent_after = sent_bytes(interface)
    result = {
        "ends_ns": ends,
        "sent_bytes": (sent_after - sent_before) / request["steps"] if sent_before and sent_after else None,
        "stolen": (stolen - stolen_before) / max(1, busy - busy_before),
        "records": system.records(),
        "breakdown": system.breakdown(),
        "asleep": asleep_share,
        "choice": system.choice(),
        "timeline": system.timeline() if request["timeline"] else (),
    }
    system.close()
    del system
    gc.collect()  # threads and sockets of this system shall not be there in the next one's steps
    return result


def _join(rank: int, world: int, device: str) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.cluster.systems import COMM_TIMEOUT

    if device == "sim":
        from simdevice import sim

        sim.set_races("off")  # looking for them takes time, and is what tests do
    logging.getLogger("fold3d").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=COMM_TIMEOUT))


def main() -> None:
    """Answers requests until standard input ends."""
    rank, world, parent = (int(text) for text in sys.argv[1:4])
    die_with(parent)
    wake_punctually()
    answer_requests(run, join=lambda: _join(rank, world, sys.argv[4]))
    os._exit(0)  # groups that torch's runtime leaves behind take long to end


if __name__ == "__main__":
    main()
