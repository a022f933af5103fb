"""Ranks that find each other over TCP: strangers at the door, a rank that breaks meanwhile, forked workers."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fold3d import _C
from fold3d.errors import RankError
from fold3d.runtime.tcp import local_address
from tests.dist.failure_jobs import engine_of, say
from tests.helpers.launch import launch
from tests.helpers.ranks import RankPool

PROMPT = 8.0
"""Seconds for something that takes none, on a machine whose cores are busy."""
STRANGERS = 200
PLANNED = {"schedule": "1f1b", "comm_timeout": 100.0}
"""Links are made once, and nobody waits for less."""


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


@pytest.mark.parametrize("part, layout", [("TcpLinks", {"pp": 2}), ("RingLinks", {"dp": 2, "dp_sync": "early"})])
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
        engine_of(PLANNED | layout)
        return "", 0.0
    except RankError as error:
        return str(error), time.monotonic() - start
    finally:
        dist.barrier()
        links.connect = original


@pytest.mark.parametrize("part, layout", [("TcpLinks", {"pp": 3}), ("RingLinks", {"dp": 3, "dp_sync": "early"})])
def test_a_rank_that_breaks_while_connecting_ends_the_others(
    ranks: RankPool, part: str, layout: dict[str, Any]
) -> None:
    """Long before comm_timeout, and with its own words."""
    for error, seconds in ranks.run(breaking, 3, part, layout, timeout=90):
        assert "failed in building the engine: OSError: no route to host" in error
        assert seconds < PROMPT


# Forked workers


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def train_with_workers(workers: int) -> None:
    """Rank 1 is killed between two steps, while its data loader's workers live."""
    engine, batch = engine_of({"pp": 2} | PLANNED)
    loader = torch.utils.data.DataLoader(
        Numbers(),
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
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
            raise SystemExit(str(error)) from None


@pytest.mark.rotating
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_do_not_keep_a_dead_ranks_connections(workers: int) -> None:
    result = launch(train_with_workers, 2, workers, timeout=100)
    times = {line.split()[0]: float(line.split()[1]) for one in result for line in one.stdout.splitlines()}
    assert set(times) == {"killed", "noticed"}, result.report()
    assert times["noticed"] - times["killed"] < PROMPT, result.report()
    assert "rank 1 (replica 0, stage 1) " in result[0].stderr, result.report()
