"""TcpLinks and RingLinks by themselves: whom they let in, and what they say when they cannot connect."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from fold3d import _C

SECRET = "s" * 64
HOST = "127.0.0.1"


def test_a_refused_connection_says_so_and_where() -> None:
    """Not that it timed out: the process that listened has ended."""
    gone = _C.TcpLinks(1, 2, HOST, SECRET)
    port = gone.port
    del gone
    links = _C.TcpLinks(0, 2, HOST, SECRET)
    start = time.monotonic()
    with pytest.raises(_C.CommError, match=f"could not connect to stage 1 at {HOST}:{port}: Connection refused"):
        links.connect((HOST, port), (HOST, port), 60.0)
    assert time.monotonic() - start < 15.0


def test_an_abort_ends_whoever_connects() -> None:
    silent = _C.RingLinks(1, 2, HOST, SECRET)
    links = _C.RingLinks(0, 2, HOST, SECRET)
    threading.Timer(0.2, links.abort, ("rank 7 failed",)).start()
    with pytest.raises(_C.CommError, match="rank 7 failed"):
        links.connect((HOST, silent.port), 60.0)


def connect_both(first: Any, second: Any, timeout: float) -> list[str]:
    """Returns the errors of two stages that connect."""
    errors: list[str] = []

    def connect(links: Any, other: Any) -> None:
        try:
            links.connect((HOST, other.port), (HOST, other.port), timeout)
        except _C.CommError as error:
            errors.append(str(error))

    thread = threading.Thread(target=connect, args=(second, first))
    thread.start()
    connect(first, second)
    thread.join()
    return errors


@pytest.mark.parametrize(
    "secret, job, connects",
    [(SECRET, "replica 0", True), (SECRET, "replica 1", False), (SECRET[:-1] + "t", "replica 0", False)],
    ids=["the same", "another job", "a secret that differs in its last character"],
)
def test_who_gets_in(secret: str, job: str, connects: bool) -> None:
    first = _C.TcpLinks(0, 2, HOST, SECRET, "replica 0")
    second = _C.TcpLinks(1, 2, HOST, secret, job)
    errors = connect_both(first, second, 30.0 if connects else 0.5)
    assert len(errors) == (0 if connects else 2), errors


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(_C.CommError, match="needs at least 32"):
        _C.TcpLinks(0, 2, HOST, "short")
