"""Ranks on the simulated device that are killed, stopped or end in an exception: the others say whose fault it was, and
end, though their device waits for a rank that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.failure_jobs import TIMEOUT
from tests.dist.test_failure_processes import DIAGNOSIS, EXIT, run

PROGRAM = Path(__file__).parent / "failures.py"
SAYS = "stops:"
"""Whatever ended it, a rank that only suffers says one line of this form."""
DRAIN = 10.0
"""Seconds that the device waits for its kernels at the end of a process."""


@pytest.mark.parametrize(
    ("layout", "trap", "limit", "text"),
    [
        ({"dp": 2, "pp": 2, "segments": 2}, {"rank": 3, "place": "backward", "what": "SIGKILL"}, DIAGNOSIS, "is dead"),
        ({"dp": 2, "dp_sync": "zero1"}, {"rank": 1, "place": "hook", "what": "SIGKILL"}, DIAGNOSIS, "is dead"),
        ({"pp": 2}, {"rank": 1, "place": "forward", "what": "SIGSTOP"}, TIMEOUT + DIAGNOSIS, "stopped"),
        ({"dp": 2}, {"rank": 1, "place": "stepped", "what": "SIGSTOP"}, TIMEOUT + DIAGNOSIS, "stopped"),
        ({"pp": 2, "segments": 2}, {"rank": 1, "place": "outside"}, 0.0, "ZeroDivisionError: broken in outside"),
        ({"dp": 2}, {"rank": 1, "place": "optimizer"}, 0.0, "ZeroDivisionError: broken in optimizer"),
    ],
    ids=lambda value: value["what"] if isinstance(value, dict) and "what" in value else None,
)
def test_the_others_end(layout: dict[str, Any], trap: dict[str, Any], limit: float, text: str) -> None:
    ended = run(layout, trap, script=True, program=PROGRAM)
    ended.check(trap["rank"], limit + EXIT + DRAIN, f"{SAYS} rank {trap['rank']} (", text)
