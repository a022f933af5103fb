"""One rank of the cluster: `python -m benchmarks.cluster.worker JOB_FILE RANK`, started by run.py."""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
TIMER_SLACK_NS = 1000


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


def run(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Runs warm-up and measured steps back to back; returns this rank's result."""
    import torch
    import torch.distributed as dist

    from benchmarks.cluster.scenarios import Scenario
    from benchmarks.cluster.systems import COMM_TIMEOUT, find_system

    logging.getLogger("fold3d").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    scenario = Scenario(**job["scenario"])
    dist.init_process_group("gloo", rank=rank, world_size=scenario.ranks, timeout=timedelta(seconds=COMM_TIMEOUT))
    system = find_system(job["system"], scenario).on_this_rank(scenario)
    for _ in range(job["warm_up"]):
        system.step()
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    dist.barrier()
    sent_before = sent_bytes(interface)
    stamps = [time.perf_counter()]
    for _ in range(job["steps"]):  # no barrier in between: a step may begin while the one before still communicates
        system.step()
        stamps.append(time.perf_counter())
    dist.barrier()
    sent_after = sent_bytes(interface)
    result = {
        "step_s": (stamps[-1] - stamps[0]) / job["steps"],
        "steps_s": [end - start for start, end in itertools.pairwise(stamps)],
        "sent_bytes": None if sent_before is None or sent_after is None else (sent_after - sent_before) / job["steps"],
        "records": list(system.records()),
    }
    system.close()
    return result


def main() -> None:
    """Writes RANK's result beside the job file."""
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    die_with(job["parent"])
    # By default the kernel wakes sleepers up to 50 us late: 2 % of a layer's forward pass in scenario A.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS)
    result = run(job, rank)
    path.with_name(f"result{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # torch's runtime leaves groups behind that take long to end


if __name__ == "__main__":
    main()
