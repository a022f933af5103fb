"""A rank that raises or does not come: every rank gets the same clear error in time, and nothing hangs afterwards."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fold3d.comms.connections import uses_tcp
from fold3d.device import default_device
from fold3d.engine import builder
from fold3d.errors import RankError
from tests.dist.failure_jobs import TIMEOUT, engine_of, outcome
from tests.helpers.ranks import RankPool

PROMPT = 6.0
"""Seconds for the news of an error, on a machine whose cores are busy."""
DIAGNOSIS = 3.0
"""Seconds a rank looks around for who failed."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "1x2": {"pp": 2},
    "2x2": {"dp": 2, "pp": 2},
    "1x4": {"pp": 4},
    "2x2 folded": {"dp": 2, "pp": 2, "segments": 2, "transport": "c10d"},
    "4x1": {"dp": 4},
}


def coordinates(layout: dict[str, Any], rank: int) -> str:
    pp = layout.get("pp", 1)
    return f"rank {rank} (replica {rank // pp}, stage {rank % pp})"


def world(layout: dict[str, Any]) -> int:
    return int(layout.get("dp", 1) * layout.get("pp", 1))


RAISES = [
    ("1x2", 1, "forward", r"1F\d of step 2"),
    ("1x2", 0, "backward", r"0B\d of step 2"),
    ("1x4", 2, "hook", r"2B\d of step 2"),
    ("1x4", 3, "loss", r"3F\d of step 2"),
    ("1x4", 1, "evaluation", r"1F0 of an evaluation"),
    ("2x2", 3, "forward", r"1F\d of step 2"),
    ("2x2", 0, "optimizer", "the optimizer of step 2"),
    ("2x2 folded", 2, "backward", r"2B\d of step 2"),
    ("2x2 folded", 1, "hook", r"3B\d of step 2"),
    ("4x1", 2, "hook", r"0B\d of step 2"),
]


@pytest.mark.parametrize("name, rank, place, where", RAISES)
def test_a_rank_that_raises(ranks: RankPool, name: str, rank: int, place: str, where: str) -> None:
    layout = LAYOUTS[name]
    found = ranks.run(outcome, world(layout), layout, {"rank": rank, "place": place}, timeout=40)
    for one in found:
        assert one["error"].startswith(f"{coordinates(layout, rank)} failed in "), found
        assert re.search(f"{where}: ZeroDivisionError: broken in {place}", one["error"]), found
        assert one["ended"] - found[rank]["sprang"] < PROMPT, found
    assert found[rank]["cause"] == "ZeroDivisionError"


def connecting_fails(rank: int) -> str:
    """The network of one rank is broken when the engines are built: with the first that ranks do there together."""
    first = "connect_stages" if uses_tcp("auto", default_device()) else "find_hosts"
    original = getattr(builder, first)

    def connect(*args: Any) -> Any:
        if dist.get_rank() == rank:
            raise OSError("no route to host")
        return original(*args)

    with mock.patch.object(builder, first, connect):
        try:
            engine_of({"pp": 2})
        except RankError as error:
            return str(error)
    return ""


def test_a_rank_that_cannot_connect(ranks: RankPool) -> None:
    for error in ranks.run(connecting_fails, 2, 1, timeout=40):
        assert error.startswith("rank 1 (replica 0, stage 1) failed in building the engine: OSError: no route"), error


@pytest.mark.parametrize("name, rank, place", [("1x4", 2, "outside"), ("2x2", 3, "hook"), ("2x2", 0, "optimizer")])
def test_a_rank_that_does_not_come(ranks: RankPool, name: str, rank: int, place: str) -> None:
    """It sleeps; the others name it although those next to it are not the ones that hold them up."""
    layout = LAYOUTS[name]
    found = ranks.run(outcome, world(layout), layout, {"rank": rank, "place": place, "what": "sleep"}, timeout=60)
    for other, one in enumerate(found):
        assert one["error"].startswith(f"{coordinates(layout, rank)} does not come in time (setting comm_timeout"), (
            found
        )
        limit = 2 * TIMEOUT if other == rank else TIMEOUT + DIAGNOSIS
        assert one["ended"] - found[rank]["sprang"] < PROMPT + limit, found
