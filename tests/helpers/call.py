"""One call on one rank: the environment torchrun would give it, a gloo group, a clean slate afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import importlib
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_modules = 0
"""How many were imported when imports were frozen last."""


def freeze_imports(least: int = 1) -> None:
    """Keeps what was imported out of searches for garbage, where it has become `least` modules more: it never dies, and
    looking through it took a sixth of the suite's time."""
    global _modules
    if len(sys.modules) >= _modules + least:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)


def reference(target: str | Callable[..., Any]) -> str:
    """Returns "module:function" for `target`, the only form that crosses a process border.

    Raises:
        TypeError: `target` is a closure, lambda or method, which a fresh process could not find by name.
    """
    if isinstance(target, str):
        if target.count(":") != 1:
            raise TypeError(f"{target!r} is not of the form 'module:function'")
        return target
    name = getattr(target, "__qualname__", "")
    if not name or "<" in name or not hasattr(target, "__module__"):
        raise TypeError(f"{target!r} is not a function at the top of a module: no worker could import it by name")
    return f"{target.__module__}:{name}"


def resolve(ref: str) -> Callable[..., Any]:
    """Returns the function that `ref` ("module:function") names, importing its module."""
    module, name = ref.split(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def free_port() -> int:
    """Returns a TCP port that was free a moment ago on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the variables torchrun sets on a single host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends: an interrupted test run leaves no orphan."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextlib.contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables, or takes them away (None), and puts the old ones back."""
    before = {name: os.environ.get(name) for name in values}
    _change_environment(values)
    try:
        yield
    finally:
        _change_environment(before)


def _change_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _backend() -> str:
    """Returns gloo, and beside it the library of a device that a test has added to torch: the Trainer needs both."""
    import torch
    import torch.distributed as dist

    kind = torch._C._get_privateuse1_backend_name()
    library = dist.Backend.default_device_backend_map.get(kind)
    return "gloo" if library is None else f"cpu:gloo,{kind}:{library}"


@contextlib.contextmanager
def process_group(store_file: str, rank: int, world_size: int, timeout_s: float) -> Iterator[None]:
    """Gives the body a default gloo group over a file rendezvous; no port is involved.

    The body starts when every rank is connected: one that ended its group earlier (a body without a collective
    is over in no time) would cut the connections that gloo is still making on another rank.
    """
    import torch.distributed as dist

    store = dist.FileStore(store_file, world_size)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(_backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        if store.add("connected", 1) == world_size:
            store.set("all connected", "")
        store.wait(["all connected"], timeout)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def clean_slate() -> None:
    """Undoes what a call leaves behind in a process that serves many: seeds, dtype, accelerate's state, the current one
    of the simulated device's (an engine makes its own current, and so the next call's kernels would go there)."""
    import torch

    if "simdevice.sim" in sys.modules:
        torch.accelerator.set_device_index(0)
    state = sys.modules.get("accelerate.state")
    if state is not None:  # singletons which remember rank and world size of the last call
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)
    gc.collect()  # engines left in reference cycles own threads and process groups
