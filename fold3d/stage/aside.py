"""aside(): runs a function in a forked copy of the process, so that nothing it changes remains."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_in_copy = False


class AsideError(Exception):
    """The function raised, took too long, or the copy of the process died; the message says which."""

    def __init__(self, message: str, *, took_too_long: bool = False) -> None:
        super().__init__(message)
        self.took_too_long = took_too_long


def is_aside() -> bool:
    """Returns whether this process is a copy that runs such a function: it reaches no other rank."""
    return _in_copy


def aside(function: Callable[[], T], seconds: float) -> T:
    """Returns what `function` returns in a copy of this process.

    The copy has this thread only. It has no standard output, no sockets of fold3d's (see `comms/forked.py`), and must
    not use a device; on return it is gone. Nothing that the function draws, counts, keeps or changes is seen here.

    Args:
        function: returns what can be pickled.
        seconds: how long it may take.
    Raises: AsideError when it does not return.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_copy(function, writer)
    os.close(writer)
    try:
        content = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # somebody ignores SIGCHLD
            os.waitpid(child, 0)
    if content is None:
        raise AsideError(f"it took longer than {seconds:g} seconds", took_too_long=True)
    if not content:
        raise AsideError("its process died")
    returned, value = pickle.loads(content)
    if not returned:
        raise AsideError(value)
    result: T = value
    return result


def _be_the_copy(function: Callable[[], Any], writer: int) -> None:
    global _in_copy
    _in_copy = True
    try:
        gc.disable()  # what would be collected belongs to the process that goes on
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
        torch.set_num_threads(1)  # the pool of the process that forked is not here
        torch.cuda._lazy_init = lambda: None
        try:
            content = pickle.dumps((True, function()))
        except BaseException as error:
            content = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        while content:
            content = content[os.write(writer, content) :]
    finally:
        os._exit(0)


def _read(descriptor: int, deadline: float) -> bytes | None:
    """Returns all that comes until the end; None when that takes too long."""
    content = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        more = os.read(descriptor, 1 << 16)
        if not more:
            return content
        content += more
