"""Ranks that find each other over TCP: strangers at the door, a rank that breaks meanwhile, forked workers."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fold3d import _C
from fold3d.comms.interface import local_address
from fold3d.errors import RankError
from tests.dist.failure_jobs import engine_of, say
from tests.helpers.launch import launch
from tests.helpers.ranks import RankPool

PROMPT = 8.0
"""Seconds for something that takes none, on a machine whose cores are busy."""
LATE = 20.0
"""Seconds for what takes a few: the others look around for who failed, and call again where a call was refused."""
STRANGERS = 200
PLANNED = {"schedule": "1f1b", "comm_timeout": 100.0}
"""NetworkCosts are made once, and nobody waits for less."""


# Strangers


def flooded(part: str, layout: dict[str, Any]) -> tuple[float, float]:
    """Rank 0 has strangers at its door who say nothing, or the wrong thing, before it lets in anybody."""
    links = getattr(_C, part)
    original = links.connect
    strangers: list[socket.socket] = []
    seconds: list[float] = []

    def connect(self: Any, *args: Any) -> None:
        if dist.get_rank() == 0:
            for number in range(STRANGERS):
                strangers.append(socket.create_connection((local_address(), self.port), timeout=10.0))
                strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * (number % 3))
        start = time.monotonic()
        original(self, *args)
        seconds.append(time.monotonic() - start)

    links.connect = connect
    try:
        engine, batch = engine_of(PLANNED | layout)
        loss = float(engine.step(batch).loss)
        engine.close()
    finally:
        links.connect = original
        for stranger in strangers:
            stranger.close()
    return max(seconds), loss


@pytest.mark.parametrize("part, layout", [("TcpPeers", {"pp": 2}), ("RingPeers", {"dp": 2, "dp_sync": "early"})])
def test_strangers_at_the_door_hold_up_nobody(ranks: RankPool, part: str, layout: dict[str, Any]) -> None:
    for seconds, loss in ranks.run(flooded, 2, part, layout):
        assert seconds < PROMPT and loss > 0


# A rank that breaks


def breaking(part: str, layout: dict[str, Any]) -> tuple[str, float]:
    """The last rank breaks when all others wait for it; nobody sees its connections end, as it keeps its door open."""
    links = getattr(_C, part)
    original = links.connect
    kept: list[Any] = []

    def connect(self: Any, *args: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            kept.append(self)
            time.sleep(0.5)
            raise OSError("no route to host")
        original(self, *args)

    links.connect = connect
    start = time.monotonic()
    try:
        engine_of(layout)
        return "", 0.0
    except (RankError, OSError) as error:
        return str(error), time.monotonic() - start
    finally:
        dist.barrier()
        links.connect = original


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("part, layout", [("TcpPeers", {"pp": 3}), ("RingPeers", {"dp": 3, "dp_sync": "early"})])
def test_a_rank_that_breaks_while_connecting_ends_the_others(
    ranks: RankPool, part: str, layout: dict[str, Any]
) -> None:
    """Long before comm_timeout, and with its own words."""
    for error, seconds in ranks.run(breaking, 3, part, PLANNED | layout, timeout=90):
        assert "failed in building the engine: OSError: no route to host" in error
        assert seconds < PROMPT


def test_a_rank_that_breaks_while_links_are_measured_ends_the_others(ranks: RankPool) -> None:
    """Before there is an engine whose failure could be told: its door is shut."""
    found = ranks.run(breaking, 2, "TcpPeers", {"pp": 2, "segments": "auto", "comm_timeout": 100.0}, timeout=90)
    assert "could not connect to stage 1 at " in found[0][0], found
    assert found[1][0] == "no route to host" and max(seconds for _, seconds in found) < LATE, found


# Forked workers


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Whose later items take long: a worker that makes one does not look whether its parent lives."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0 if index == 0 else 2 * LATE)
        return torch.tensor(float(index))


def train_with_workers(layout: dict[str, Any]) -> None:
    """The last rank is killed between two steps, while its data loader's workers live."""
    engine, batch = engine_of(PLANNED | layout)
    loader = torch.utils.data.DataLoader(
        Numbers(), num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    iterator = iter(loader)
    next(iterator)
    for step in range(100):
        if step == 2 and dist.get_rank() == 1:
            say(f"killed {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            engine.step(batch)
        except RankError as error:
            say(f"noticed {time.monotonic()}")
            sys.stderr.write(str(error))
            sys.stderr.flush()
            os._exit(1)  # or the workers would be waited for


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "dp_sync": "early"}], ids=["pp", "dp"])
def test_workers_do_not_keep_a_dead_ranks_connections(layout: dict[str, Any]) -> None:
    result = launch(train_with_workers, 2, layout, timeout=100)
    times = {line.split()[0]: float(line.split()[1]) for one in result for line in one.stdout.splitlines()}
    assert set(times) == {"killed", "noticed"}, result.report()
    assert times["noticed"] - times["killed"] < LATE, result.report()
    assert "rank 1 (replica " in result[0].stderr and "is dead or stopped" in result[0].stderr, result.report()


# A rank that dies


def dying(layout: dict[str, Any]) -> None:
    """The last rank is killed when all others wait for it."""
    for links in (_C.TcpPeers, _C.RingPeers):
        links.connect = functools.partialmethod(_die_or, links.connect)  # type: ignore[method-assign,assignment]
    try:
        engine_of(PLANNED | layout)
    except RankError as error:
        say(f"noticed {time.monotonic()}")
        raise SystemExit(str(error)) from None


def _die_or(links: Any, connect: Any, *args: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.5)
        say(f"killed {time.monotonic()}")
        os.kill(os.getpid(), signal.SIGKILL)
    connect(links, *args)


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"pp": 3}, {"dp": 3, "dp_sync": "early"}], ids=["pp", "dp"])
def test_a_rank_that_is_killed_while_connecting_ends_the_others(layout: dict[str, Any]) -> None:
    result = launch(dying, 3, layout, timeout=100)
    said = [line.split() for one in result for line in one.stdout.splitlines()]
    killed = [float(when) for what, when in said if what == "killed"]
    noticed = [float(when) for what, when in said if what == "noticed"]
    assert len(killed) == 1 and len(noticed) == 2, result.report()
    assert max(noticed) - killed[0] < LATE, result.report()
    for one in result[:2]:
        assert "rank 2 (replica " in one.stderr, result.report()
