"""BuiltRank by itself: who ends what it has."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from fold3d.engine.built import BuiltRank


def test_a_forked_child_closes_nothing_of_its_parent() -> None:
    """Its interpreter comes here when it ends: a wait for a thread of the parent would never end."""
    closed: list[str] = []
    parts: dict[str, Any] = dict.fromkeys(("cut", "groups", "recorder", "step", "memory"))
    parts["sync"] = SimpleNamespace(finish=lambda: closed.append("sync"))
    life = SimpleNamespace(life=SimpleNamespace(failure=None))
    parts["supervisor"] = SimpleNamespace(progress=life, close=lambda: closed.append("supervisor"))
    rank = BuiltRank(undo=ExitStack(), **parts)
    rank.undo.callback(closed.append, "groups")
    child = os.fork()
    if child == 0:
        try:
            rank.close()
        finally:
            os._exit(len(closed))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rank.close()
    assert closed == ["sync", "supervisor", "groups"]
