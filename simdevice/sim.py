"""Makes the simulated device known to torch as "sim"; import it in a process of its own.

It becomes torch's accelerator, which other tests of the same process would notice. What torch has generic names for
goes by these: `torch.device("sim:1")`, `torch.Stream`, `torch.Event`, `torch.accelerator`, `Tensor.record_stream`,
`pin_memory`. The functions of this module are those that only a simulation can have. README.md says what is simulated.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from simdevice.build import build

END_TIMEOUT_S = 10.0
"""How long the end of the process waits for kernels: those that run on would use what is being destroyed."""


def _load() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("_simdevice", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_C = _load()


def sleep(milliseconds: float) -> None:
    """Queues a kernel of so long on the current stream."""
    _C.sleep(milliseconds)


class Occupation:
    """Takes up the current stream from where it is made to `end`, kernels queued between the two included."""

    def __init__(self) -> None:
        self._occupation = _C.Occupation()

    def end(self, milliseconds: float) -> None:
        """Ends it so long after its beginning, or when what was queued is done, if that is later."""
        self._occupation.end(milliseconds)


def set_races(races: Literal["raise", "record", "off"]) -> None:
    """Says what is done about races: to raise at the line that launches the later access is the default."""
    _C.set_races(races)


def take_reports() -> list[str]:
    """Returns the races that were found since the last call."""
    reports: list[str] = _C.take_reports()
    return reports


def use_on_host(tensor: torch.Tensor, *, writes: bool, what: str) -> None:
    """Tells the detector that the host uses pinned memory now, in a way that it cannot see."""
    _C.use_on_host(tensor, writes, what)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Within it races are not raised; the list has them at its end, when the device has done all its work."""
    found: list[str] = []
    take_reports()
    set_races("record")
    try:
        yield found
    finally:
        for index in range(_C.device_count()):
            _C.synchronize(index)
        set_races("raise")
        found += take_reports()


@contextmanager
def left_out(ordering: str, thread: str) -> Iterator[None]:
    """Within it a thread forgets to order work: what it does to that end has no effect, as if its program had not done
    it. For tests of whether that is noticed.

    Args:
        ordering: "event_block", "event_synchronize", "event_query" (says at once that it has passed), "record_stream",
            "work_wait", "news" (that an event has passed, which is said rightly, but orders nothing for the rest of the
            host: for threads that only look, so that what they hear does not hide what others forget).
        thread: its name in the system; "main" is the one that runs Python.
    Raises: ValueError when the thread had nothing to leave out.
    """
    _C.leave_out(ordering, thread)
    count = 0
    try:
        yield
    finally:
        count = _C.leave_nothing_out()
    if count == 0:
        raise ValueError(f"the thread {thread} never came to {ordering}")


@contextmanager
def jitter(microseconds: int) -> Iterator[None]:
    """Within it each kernel is delayed at random by up to so long."""
    _C.set_jitter(microseconds)
    try:
        yield
    finally:
        _C.set_jitter(0)


@contextmanager
def poison() -> Iterator[None]:
    """Within it memory is overwritten with NaN, on its stream, whenever it is handed out."""
    _C.set_poison(True)
    try:
        yield
    finally:
        _C.set_poison(False)


def set_device_bytes(size: int) -> None:
    """Says how much memory a device has, 16 GiB at first: more than that in use is a torch.OutOfMemoryError."""
    _C.set_device_bytes(size)


@contextmanager
def network(bytes_per_second: float) -> Iterator[None]:
    """Within it collectives and messages are so fast at most, by what a rank sends or receives in one once all are
    there; 0: as fast as gloo."""
    _C.set_network(bytes_per_second)
    try:
        yield
    finally:
        _C.set_network(0)


def launches() -> int:
    """Returns how many kernels were launched in this process."""
    return int(_C.launches())


def host_waits() -> int:
    """Returns how often the calling thread has waited for a device: for a stream, an event, a number, a copy."""
    return int(_C.host_waits())


def blocking_operators() -> int:
    """Returns how many operators made the host wait because only their kernel knows the sizes of their results."""
    return int(_C.blocking_operators())


def _index(device: Any = None) -> int:
    if device is None:
        return int(_C.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(_C.current_device()) if index is None else index


class _Device:
    """torch.sim.device: makes a device the current one, for a while."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = _C.current_device()
        if self._index >= 0:
            _C.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _C.set_device(self._before)


def _device_module() -> types.ModuleType:
    """torch.sim: what torch looks for by name (checkpoint, seeds, autocast, distributed)."""
    module = types.ModuleType("torch.sim")
    generators = [_C.default_generator(i) for i in range(_C.device_count())]

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_initialized": True,  # else checkpoint does not keep the state of its generators
        "device": _Device,
        "device_count": _C.device_count,
        "current_device": _C.current_device,
        "set_device": lambda device: _C.set_device(_index(device)),
        "synchronize": lambda device=None: _C.synchronize(_index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "stream": lambda stream: stream,  # a torch.Stream is a context manager itself
        "Stream": lambda device=None, priority=0: torch.Stream(f"sim:{_index(device)}", priority=priority),
        "Event": lambda enable_timing=False: torch.Event("sim", enable_timing=enable_timing),
        "default_generators": generators,
        "manual_seed": lambda seed: generators[_index()].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device="sim": generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device="sim": generators[_index(device)].set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda *_: True,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module


@functools.cache
def _sockets() -> Any:
    """One for all groups: each has a thread that wakes up a hundred times a second, whether anything comes or not."""
    gloo, interface = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    # Groups with a device that they are given wait for ever for a lazy one.
    if not interface:
        return gloo.create_default_device(lazy_init=False)
    return gloo.create_device(interface=interface, lazy_init=False)


def _process_group(options: Any, _: Any = None) -> Any:
    of_gloo = dist.ProcessGroupGloo._Options()
    of_gloo._timeout, of_gloo._devices = options.timeout, [_sockets()]
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, of_gloo)
    return _C.process_group(gloo, options.group_rank, options.group_size)


def _register() -> None:
    _C.register_device()
    torch.utils.rename_privateuse1_backend("sim")
    module = _device_module()
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _process_group, extended_api=True, devices=["sim"])
    atexit.register(_C.drain, END_TIMEOUT_S)


_register()
