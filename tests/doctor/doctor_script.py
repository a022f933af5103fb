"""`fold3d doctor` on one rank of several, for tests; what goes wrong is its argument."""

from __future__ import annotations

import os
import sys
import time
from unittest import mock

from fold3d.cli.main import main
from fold3d.doctor import examination
from fold3d.errors import RankError

ALONE = ["doctor", "--device", "cpu", "--size", "1"]
TIMEOUT = 12


def broken(*_: object) -> None:
    raise RankError("a cable is loose")


def run(what: str, bad_rank: str) -> int:
    is_bad = os.environ["RANK"] == bad_rank
    if what == "silent" and is_bad:
        time.sleep(2 * TIMEOUT)
        return 0
    if what == "broken" and is_bad:
        with mock.patch.object(examination, "collective_speeds", broken):
            return main([*ALONE, "--timeout", str(TIMEOUT)])
    return main([*ALONE, "--timeout", str({"well": 120, "short": 4}.get(what, TIMEOUT))])


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
