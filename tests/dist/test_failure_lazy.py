"""A rank that fails while weights are still on their way from the step before."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import pytest

from tests.dist import failure_jobs
from tests.dist.failure_jobs import TIMEOUT, outcome
from tests.helpers.launch import launch
from tests.helpers.ranks import RankPool

PROMPT = 6.0
"""Seconds for the news of an error, on a machine whose cores are busy."""
DIAGNOSIS = 3.0
"""Seconds a rank looks around for who failed."""
EXIT = 25.0
"""Seconds until the interpreter has ended, on a machine whose cores are busy."""
WIDE = 768
"""Width of layers whose gathers take longer than it takes to die."""
FOLDED: dict[str, Any] = {"dp": 2, "pp": 2, "segments": 2, "bucket_bytes": 1}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "failed", "place", "what"),
    [
        ({"dp": 2, "dp_sync": "zero1"}, 1, "stepped", "SIGKILL"),
        ({"dp": 2, "dp_sync": "early"}, 1, "stepped", "SIGSTOP"),
        (FOLDED | {"dp_sync": "zero1"}, 3, "optimizer", "SIGSTOP"),
        (FOLDED | {"dp_sync": "zero1"}, 2, "optimizer", "SIGKILL"),
        (FOLDED | {"dp_sync": "early", "transport": "c10d"}, 3, "forward", "SIGKILL"),
        (FOLDED | {"dp_sync": "early"}, 0, "forward", "SIGSTOP"),
        (FOLDED | {"dp_sync": "zero1"}, 1, "forward", "SIGKILL"),
        (FOLDED | {"dp_sync": "early"}, 2, "optimizer", "SIGKILL"),
    ],
    ids=[
        "gathers break off",
        "gathers stand still",
        "gathers are never sent",
        "gathers are never sent, nor is anything else",
        "between two layers",
        "the first rank stands still",
        "the last stage",
        "the first stage",
    ],
)
def test_a_rank_that_vanishes_during_a_lazy_gather(layout: dict[str, Any], failed: int, place: str, what: str) -> None:
    """Every other rank ends with an error that names it, although the step it vanished after was complete."""
    processes = layout["dp"] * layout.get("pp", 1)
    width = WIDE if "pp" not in layout else 16
    trap = {"rank": failed, "place": place, "what": what}
    start = time.monotonic()
    result = launch(failure_jobs.train, processes, layout, trap, 4, width, True, timeout=100)
    lines = [line for one in result for line in one.stdout.splitlines() if line.startswith("trap ")]
    assert len(lines) == 1 and not result.orphans, result.report()
    sprang = float(lines[0].split()[1]) - start
    limit = DIAGNOSIS + EXIT + (TIMEOUT if what == "SIGSTOP" else 0)
    pp = layout.get("pp", 1)
    for rank, one in enumerate(result):
        if rank == failed:
            assert one.stopped if what == "SIGSTOP" else one.returncode == -signal.SIGKILL
            continue
        assert one.returncode == 1 and not one.timed_out and "done" not in one.stdout, result.report()
        last = [line for line in one.stderr.splitlines() if " stops: " in line][-1]
        assert f"rank {failed} (replica {failed // pp}, stage {failed % pp}) " in last, result.report()
        assert one.seconds - sprang < limit, result.report()


@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_a_loss_function_that_raises_in_a_lazy_step(ranks: RankPool, dp_sync: str) -> None:
    layout, trap = FOLDED | {"dp_sync": dp_sync}, {"rank": 3, "place": "loss"}
    found = ranks.run(outcome, 4, layout, trap, lazy=True, timeout=40)
    for one in found:
        where = r"^rank 3 \(replica 1, stage 1\) failed in 3F\d of step 2: ZeroDivisionError: broken in loss"
        assert re.search(where, one["error"]), found
        assert one["ended"] - found[3]["sprang"] < PROMPT, found
    assert found[3]["cause"] == "ZeroDivisionError"


def test_a_rank_that_never_steps_again(ranks: RankPool) -> None:
    """Its weights are complete and so are the others': they wait for it in the next step, and say so."""
    trap = {"rank": 1, "place": "stepped", "what": "sleep"}
    found = ranks.run(outcome, 4, FOLDED | {"dp_sync": "zero1"}, trap, lazy=True, timeout=60)
    for rank, one in enumerate(found):
        name = "rank 1 (replica 0, stage 1) does not come in time (setting comm_timeout): it is outside fold3d"
        assert one["error"].startswith(name), one["error"]
        limit = 2 * TIMEOUT if rank == 1 else TIMEOUT + DIAGNOSIS
        assert one["ended"] - found[1]["sprang"] < PROMPT + limit, found
