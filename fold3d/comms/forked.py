"""Forked processes, such as the workers of a data loader, and the connections of the rank that forked them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from fold3d import _C


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that are forked later do not keep the TCP connections that the body makes, torch's above all.

    A connection ends when nobody has it any more: a worker that outlives its killed rank would let the others wait. In
    a child the connection is replaced by /dev/null, if it is still the one that the body made. fold3d's own links need
    no such help.
    """
    before = _connections()
    try:
        yield
    finally:
        for descriptor, inode in _connections() - before:
            _C.keep_from_children(descriptor, inode)


def _connections() -> set[tuple[int, int]]:
    """Returns descriptor and inode of this process's TCP sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, the listing's own among them
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:[") and _is_tcp(int(name)):
                found.add((int(name), int(target[len("socket:[") : -1])))
    return found


def _is_tcp(descriptor: int) -> bool:
    one = socket.socket(fileno=os.dup(descriptor))
    with one:
        return one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
