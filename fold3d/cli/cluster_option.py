"""The options of `fold3d plan` that describe a cluster: hosts, links, devices and what they cost."""

from __future__ import annotations

import argparse
import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from fold3d.config import AUTO, TP_WAYS, check_memory, parse_bytes
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.cluster.devices import Device
    from fold3d.plan.job import Hosts


DTYPES = ("float32", "bfloat16", "float16")
_SUSTAINED = 0.45
"""Of a device's peak, where nobody says: Narayanan et al. (2021) report 44 to 52 % for models of 39B to 1T on A100."""
_PLANNED = 0.9
"""Of a device's memory, and of a host's, as training plans with."""
_OF_FILE = {
    **dict.fromkeys(("hosts", "gpus_per_host"), int),
    **dict.fromkeys(("link", "within", "memory", "memory_limit", "host_memory", "device"), str),
    **dict.fromkeys(("tflops", "price", "copy_bandwidth"), float),
}
"""What a file may say, and of which type."""
_DEFAULTS = {"bandwidth": 10.0, "latency": 50.0, "tflops": 50.0, "copy_bandwidth": 25.0}
_LINK = re.compile(
    r"(?P<rate>\d+\.?\d*(e\d+)?)\s*(?P<prefix>[GMT])bit(/s)?\s*,\s*(?P<time>\d+\.?\d*)\s*(?P<unit>us|ms)", re.I
)


def add(costs: Any) -> None:
    """Adds them to the group of options that has --bandwidth and the like."""
    costs.add_argument("--hosts", type=int, metavar="N", help="number of hosts; with --gpus-per-host, in place of -w")
    costs.add_argument(
        "--link", metavar="GBIT,US", help="bandwidth and latency of a host to other hosts, such as 25Gbit,50us"
    )
    costs.add_argument(
        "--within", metavar="GBIT,US", help="bandwidth and latency between GPUs of a host, such as 2400Gbit,5us"
    )
    costs.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="GPU model, such as A100-80GB; sets speed, memory and links within a host. Repeat it for a table of "
        "several models; A100:8,T4:8 is one job on both kinds, 8 of each in the order of processes",
    )
    costs.add_argument("--memory", metavar="SIZE", help="memory of a GPU, such as 80GB; --memory-limit is 90 %% of it")
    costs.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="memory of a host, such as 1152GB, 90 %% of which its GPUs may use for offload; default: that of rented "
        "machines with the --device, without one: any",
    )
    costs.add_argument(
        "--price",
        action="append",
        type=float,
        metavar="P",
        help="price per GPU and hour; prints the cost of tokens; repeat it for each --device",
    )
    costs.add_argument("--cluster", metavar="FILE", help=f"TOML or JSON file with any of: {', '.join(_OF_FILE)}")


def of_each_device(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Returns the options for each --device alone; of one or none, the options themselves. Raises: ConfigError."""
    names, prices = options.device or [None], options.price or [None]
    if len(prices) not in (1, len(names)):
        raise ConfigError(f"--price is given {len(prices)} times, and --device {len(names)} times; give one of each")
    prices = prices * len(names) if len(prices) == 1 else prices
    return [
        argparse.Namespace(**(vars(options) | {"device": name, "price": price}))
        for name, price in zip(names, prices, strict=True)
    ]


def settle(options: argparse.Namespace) -> None:
    """Makes the options of one device complete. Sets `world_size`, the defaults of what is not said, `peak` (FLOPs per
    second of a device in the dtype, None where it is not known), `pool_limit` (bytes of host memory that a process may
    use, None for any), `placement` (`Hosts`, None where links are said per process) and `slowness` (how long each rank
    takes relative to the fastest one, empty where all are alike).

    Raises: ConfigError for what makes no sense, or contradicts each other.
    """
    from fold3d.plan.job import HostLink, Hosts

    if options.cluster is not None:
        for name, value in _of_file(options.cluster).items():
            target = "ranks_per_host" if name == "gpus_per_host" else name
            if getattr(options, target) is None:  # the command line goes first
                setattr(options, target, value)
    kinds = [] if options.device is None else _kinds(options.device)
    if len(kinds) > 1 and options.tflops is not None:
        raise ConfigError(f"--tflops says one speed, and --device {options.device} has several; leave it out")
    said = sum(number for _, number in kinds)
    if said and options.hosts is None and options.world_size is None:
        options.world_size = said
    _count(options)
    device, options.slowness = _device(options, kinds)
    for one, other in (
        ("link", "bandwidth"),
        ("link", "latency"),
        ("within", "tp_bandwidth"),
        ("within", "tp_latency"),
    ):
        if getattr(options, one) is not None and getattr(options, other) is not None:
            raise ConfigError(f"--{other.replace('_', '-')} contradicts --{one}; give one of them")
    if options.memory is not None and options.memory_limit is not None:
        raise ConfigError("--memory-limit contradicts --memory, nine tenths of which are the limit; give one of them")
    options.peak = None if device is None else device.peak(options.dtype or DTYPES[0])
    if options.slowness and options.peak is not None:  # of what the devices have on average
        options.peak *= sum(1 / one for one in options.slowness) / len(options.slowness)
    if device is not None:
        memory = f"{device.memory}" if options.memory_limit is None else None
        options.memory = memory if options.memory is None else options.memory
        options.tflops = (
            _SUSTAINED * device.peak(options.dtype or DTYPES[0]) / 1e12 if options.tflops is None else options.tflops
        )
        options.copy_bandwidth = device.pcie / 1e9 if options.copy_bandwidth is None else options.copy_bandwidth
    if options.memory is not None:
        size = parse_bytes("--memory", options.memory, 1) or 0
        check_memory("--memory", size)
        options.memory_limit = int(_PLANNED * size)
    options.pool_limit = _pool_limit(options, device)
    by_host = options.hosts is not None or options.link is not None or options.within is not None
    between = _link("--link", options.link) if options.link is not None else None
    for name, value in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.placement = None
    if by_host:
        if options.ranks_per_host is None:
            raise ConfigError("--link and --within are of hosts: say how many GPUs each has, --gpus-per-host 8")
        rate, time = between or (options.bandwidth * 1e9 / 8, options.latency / 1e6)
        inside = _link("--within", options.within) if options.within is not None else None
        fast = device.within if device is not None else (options.tp_bandwidth or 100.0) * 1e9 / 8
        inside = inside or (fast, (options.tp_latency or 10.0) / 1e6)
        options.placement = Hosts(
            per_host=options.ranks_per_host, between=HostLink(rate, time), within=HostLink(*inside)
        )


def _pool_limit(options: argparse.Namespace, device: Device | None) -> int | None:
    if options.host_memory is None:
        return None if device is None else int(_PLANNED * device.host)
    if options.ranks_per_host is None:
        raise ConfigError("--host-memory is of a host: say how many GPUs it has, --gpus-per-host 8")
    size: int = parse_bytes("--host-memory", options.host_memory, 1) or 0
    per_host: int = options.ranks_per_host
    return int(_PLANNED * size) // per_host


def words_of(options: argparse.Namespace) -> str:
    """Returns what is planned for, in words."""
    hosts: Hosts | None = options.placement
    said = f"{options.world_size} processes, {options.tflops:g} TFLOP/s each"
    if options.peak is not None:
        said += f" of {options.peak / 1e12:g} in {options.dtype or DTYPES[0]}"
    if options.slowness:
        said += f", the slowest {max(options.slowness):.3g} times slower ({options.device})"
    if hosts is not None:
        rates = [
            f"{8 * link.bandwidth / 1e9:g} Gbit/s, {1e6 * link.latency:g} us" for link in (hosts.between, hosts.within)
        ]
        said += f"; {hosts.per_host} a host, between hosts {rates[0]}, within {rates[1]} each"
    return said


def _kinds(text: str) -> list[tuple[Device, int]]:
    """Returns the devices that `A100-80GB` or `A100:8,T4:8` names, and how many of each; 0 where that is not said.

    Raises: ConfigError for one that is not known.
    """
    from fold3d.cluster.devices import KNOWN, known_device

    found = []
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        device = known_device(name)
        if device is None:
            raise ConfigError(f"--device is {text!r}; known are {', '.join(KNOWN)}; or say --tflops and --memory")
        if ("," in text and not number) or (number and not (number.isdecimal() and int(number) > 0)):
            raise ConfigError(f"--device is {text!r}; kinds in one job have numbers, such as A100:8,T4:8")
        found.append((device, int(number or 0)))
    return found


def _device(
    options: argparse.Namespace, kinds: Sequence[tuple[Device, int]]
) -> tuple[Device | None, tuple[float, ...]]:
    """Returns what is planned with: of several kinds the speed of the fastest, and else what the smallest has; and how
    long each rank takes relative to that speed. Raises: ConfigError for another number of processes."""
    dtype, count = options.dtype or DTYPES[0], sum(number for _, number in kinds)
    if count not in (0, options.world_size):
        raise ConfigError(f"--device {options.device} has {count} GPUs, and there are {options.world_size} processes")
    if len(kinds) < 2:
        return (kinds[0][0] if kinds else None), ()
    fastest = max((one for one, _ in kinds), key=lambda one: one.peak(dtype))
    slowness = tuple(fastest.peak(dtype) / one.peak(dtype) for one, number in kinds for _ in range(number))
    least = {name: min(getattr(one, name) for one, _ in kinds) for name in ("memory", "within", "pcie", "host")}
    return replace(fastest, **least), slowness


def _count(options: argparse.Namespace) -> None:
    """Makes --hosts and --gpus-per-host the number of processes."""
    if options.hosts is not None:
        if options.hosts < 1:
            raise ConfigError(f"--hosts is {options.hosts}; there is at least one")
        if options.ranks_per_host is None and options.world_size and options.world_size % options.hosts == 0:
            options.ranks_per_host = options.world_size // options.hosts
        if options.ranks_per_host is None or options.ranks_per_host < 1:
            raise ConfigError(f"--hosts {options.hosts} needs a positive --gpus-per-host, or -w, a multiple of it")
        count = options.hosts * options.ranks_per_host
        if options.world_size not in (None, count):
            raise ConfigError(
                f"-w {options.world_size} contradicts --hosts * --gpus-per-host = {count}; give one of them"
            )
        options.world_size = count
    if options.world_size is None:
        raise ConfigError("say how many processes there are: -w 8, or --hosts 2 --gpus-per-host 4")


def _link(name: str, text: str) -> tuple[float, float]:
    """Returns bytes per second, and seconds."""
    found = _LINK.fullmatch(text.strip())
    rate = float(found["rate"]) * {"M": 1e6, "G": 1e9, "T": 1e12}[found["prefix"].upper()] / 8 if found else 0.0
    if found is None or not 0 < rate < math.inf:
        raise ConfigError(f"{name} is {text!r}; it must be a bandwidth and a latency, such as 25Gbit,50us")
    return rate, float(found["time"]) / {"us": 1e6, "ms": 1e3}[found["unit"].lower()]


def _of_file(path: str) -> dict[str, Any]:
    """Returns what a file says. Raises: ConfigError for one that cannot be read, and for what is no option."""
    try:
        text = Path(path).read_text()
        content = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--cluster={path!r}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--cluster={path!r}: it must hold names and values, such as hosts = 8")
    for name, value in content.items():
        kind = _OF_FILE.get(name)
        if kind is None:
            raise ConfigError(f"--cluster={path!r}: {name!r} is none of {', '.join(_OF_FILE)}")
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise ConfigError(f"--cluster={path!r}: {name} is {value!r}; it must be a {kind.__name__}")
    return content


class TpLink(TypedDict):
    """Of a rank within its tensor-parallel group, as NetworkCosts calls it."""

    tp_bandwidth: float
    """Bytes per second."""
    tp_latency: float
    """Of a hop, in seconds."""


def add_tp_link(group: Any) -> None:
    """Adds them to a group of options that has --tp and --tp-overlap elsewhere."""
    group.add_argument(
        "--tp-bandwidth",
        type=float,
        metavar="GBIT",
        help="bandwidth per process within a tensor-parallel group; default 100",
    )
    group.add_argument(
        "--tp-latency", type=float, metavar="US", help="latency of a message within a tensor-parallel group; default 10"
    )


def link_of(options: argparse.Namespace, *, has_tp: bool) -> TpLink:
    """Returns what was asked for. Raises: ConfigError for what makes no sense, or has no effect without --tp."""
    numbers = {"--tp-bandwidth": options.tp_bandwidth, "--tp-latency": options.tp_latency}
    for name, value in {**numbers, "--tp-overlap": options.tp_overlap}.items():
        if value is not None and not has_tp:
            raise ConfigError(f"{name}={value} has no effect without --tp; remove it, or add --tp 2")
    for name, value in numbers.items():
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{name} is {value:g}; it must be positive, and below 1e9")
    return TpLink(tp_bandwidth=(options.tp_bandwidth or 100.0) * 1e9 / 8, tp_latency=(options.tp_latency or 10.0) / 1e6)


def overlap_of(options: argparse.Namespace) -> str:
    """Returns how sums are hidden. Raises: ConfigError for another way."""
    overlap: str = options.tp_overlap or AUTO
    if overlap not in (AUTO, *TP_WAYS):
        raise ConfigError(f"--tp-overlap is {overlap!r}; it must be one of {', '.join((AUTO, *TP_WAYS))}")
    return overlap
