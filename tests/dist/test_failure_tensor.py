"""A rank is killed or stops in the middle of a TP.sync: all ranks of its group end with an error that names it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fold3d import _C
from fold3d.comms.connections import connect_shards
from fold3d.comms.groups import Groups
from fold3d.faults.lifetime import Lifetime
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.region import REDUCE
from fold3d.topology import Topology
from tests.helpers.launch import launch
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

TIMEOUT = 4.0
"""comm_timeout of the jobs, seconds."""
VICTIM = 1
MIDDLE = 10
"""The exchange in which it happens."""


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fall(what: str) -> None:
    """This rank is killed, stops for ever, or goes on sleeping."""
    say(f"trap {time.monotonic()}")
    if what == "sleep":
        time.sleep(3 * TIMEOUT)
    else:
        os.kill(os.getpid(), getattr(signal, what))


def exchange(over_tcp: bool, what: str) -> None:
    """Sums of many sizes; the victim falls when it has given a part of one."""
    topology = Topology(dp=1, pp=1, rank=dist.get_rank(), tp=dist.get_world_size())
    groups = Groups(topology, torch.device("cpu"), TIMEOUT, ())
    sync = connect_shards(topology, groups, _C.NicArbiter(), TIMEOUT, over_tcp=over_tcp)
    group = TensorParallelGroup(sync)
    for number in range(2 * MIDDLE):
        wait = group.start(torch.ones(1 << (number % 20)), REDUCE, REDUCE.forward)
        if number == MIDDLE and topology.rank == VICTIM:
            fall(what)
        try:
            wait()
        except RuntimeError as error:
            say(f"{type(error).__name__}: {error}")
            say(f"ended {time.monotonic()}")
            os._exit(3)
    os._exit(0)


def multiply(what: str) -> None:
    """Products whose rows are summed as they are computed, one after the other; the victim falls in one of them."""
    topology = Topology(dp=1, pp=1, rank=dist.get_rank(), tp=dist.get_world_size())
    groups = Groups(topology, torch.device("cpu"), TIMEOUT, ())
    sync = connect_shards(topology, groups, _C.NicArbiter(), TIMEOUT, over_tcp=True)
    group = TensorParallelGroup(sync, lambda: True)
    assert group.fused is not None
    x, weight = torch.ones(2048, 64), torch.ones(64, 1024)
    if topology.rank == VICTIM:
        threading.Timer(0.3, fall, (what,)).start()
    while True:
        try:
            group.fused.matmul_all_reduce(x, weight)
        except RuntimeError as error:
            say(f"{type(error).__name__}: {error}")
            say(f"ended {time.monotonic()}")
            os._exit(3)


@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_so_does_one_that_computes_while_it_sums(what: str) -> None:
    result = launch(multiply, 3, what, timeout=60)
    (trap,) = times(result, "trap")
    ended = times(result, "ended")
    assert len(ended) == 2 and max(ended) - trap < TIMEOUT + 2, result.report()
    assert all("TP.sync " in one.stdout for rank, one in enumerate(result) if rank != VICTIM), result.report()


def times(result: Any, word: str) -> list[float]:
    return [float(line.split()[1]) for one in result for line in one.stdout.splitlines() if line.startswith(f"{word} ")]


@pytest.mark.parametrize("over_tcp", [True, False], ids=["tcp", "c10d"])
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_the_group_ends_within_the_time_limit(over_tcp: bool, what: str) -> None:
    result = launch(exchange, 3, over_tcp, what, timeout=60)
    (trap,) = times(result, "trap")
    ended = times(result, "ended")
    assert len(ended) == 2, result.report()
    assert max(ended) - trap < TIMEOUT + 2, result.report()
    if over_tcp:
        texts = [one.stdout for rank, one in enumerate(result) if rank != VICTIM]
        named = "lost the connection to tensor-parallel rank" if what == "SIGKILL" else "(setting comm_timeout)"
        assert any(named in text for text in texts), result.report()
        assert all("TP.sync " in text for text in texts), result.report()


def end_by_lifetime(over_tcp: bool) -> tuple[str, float]:
    """The other rank never comes; the job fails meanwhile."""
    topology = Topology(dp=1, pp=1, rank=dist.get_rank(), tp=2)
    groups = Groups(topology, torch.device("cpu"), 5, ())  # what gloo has begun it does not end before
    sync = connect_shards(topology, groups, _C.NicArbiter(), 60, over_tcp=over_tcp)
    life = Lifetime()
    life.end_with(sync)
    text, start = "", time.monotonic()
    if topology.rank == 0:
        timer = threading.Timer(0.5, life.fail, ("rank 1 has failed",))
        timer.start()
        with pytest.raises(RuntimeError) as error:
            TensorParallelGroup(sync).exchange(torch.ones(5), REDUCE)
        text = str(error.value)
        timer.join()
    seconds = time.monotonic() - start
    groups.world.barrier()
    life.forget(sync)
    sync.close()
    return text, seconds


@pytest.mark.parametrize("over_tcp", [True, False], ids=["tcp", "c10d"])
def test_a_failure_of_the_job_ends_the_wait(ranks: RankPool, over_tcp: bool) -> None:
    (text, seconds), _ = ranks.run(end_by_lifetime, 2, over_tcp)
    assert text == "rank 1 has failed" and seconds < 4
