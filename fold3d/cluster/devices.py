"""known_device(): what NVIDIA's data sheets say of a device that is named; Machine: machines that can be rented, what
they have and cost, from the user's file and from these data sheets.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fold3d.cluster.fields import Field
from fold3d.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU."""

    flops_16_bit: float
    """FLOPs per second of tensor cores with 16-bit inputs, without sparsity."""
    flops_float32: float
    """FLOPs per second in float32, which is what torch computes it with unless TF32 is allowed."""
    memory: int
    """Bytes."""
    within: float
    """Bytes per second that it sends to the others of its host: NVLink, or PCIe where there is none."""
    pcie: float
    """Bytes per second to host memory, each way."""
    host: int
    """Bytes of host memory for each GPU: about what rented machines with it have."""

    def peak(self, dtype: str) -> float:
        """Returns the FLOPs per second in "float32", "bfloat16" or "float16"."""
        return self.flops_float32 if dtype == "float32" else self.flops_16_bit


_DEVICES = {
    "B200": Device(2250e12, 75e12, 180 * 10**9, 900e9, 64e9, 256 << 30),
    "GH200": Device(989e12, 67e12, 96 * 10**9, 450e9, 450e9, 480 << 30),
    "H200": Device(989e12, 67e12, 141 * 10**9, 450e9, 64e9, 256 << 30),
    "H100 PCIe": Device(756e12, 51e12, 80 * 10**9, 64e9, 64e9, 320 << 30),
    "H100 NVL": Device(835e12, 60e12, 94 * 10**9, 64e9, 64e9, 320 << 30),
    "H100": Device(989e12, 67e12, 80 * 10**9, 450e9, 64e9, 256 << 30),
    "H800": Device(989e12, 67e12, 80 * 10**9, 200e9, 64e9, 256 << 30),
    "A100": Device(312e12, 19.5e12, 40 * 10**9, 300e9, 32e9, 144 << 30),
    "A800": Device(312e12, 19.5e12, 80 * 10**9, 200e9, 32e9, 144 << 30),
    "A30": Device(165e12, 10.3e12, 24 * 10**9, 32e9, 32e9, 64 << 30),
    "L40S": Device(362e12, 91.6e12, 48 * 10**9, 32e9, 32e9, 192 << 30),
    "L4": Device(121e12, 30.3e12, 24 * 10**9, 32e9, 32e9, 96 << 30),
    "V100": Device(125e12, 15.7e12, 16 * 10**9, 150e9, 16e9, 96 << 30),
    "T4": Device(65e12, 8.1e12, 16 * 10**9, 16e9, 16e9, 48 << 30),
}
"""The first name that occurs in the device's counts."""
KNOWN = tuple(_DEVICES)
_WITH_HOST = ("GH200",)
"""Whose names say how much memory the host has."""
_MEMORY = re.compile(r"\b(\d+) ?GB|\b(\d\d+)$")
"""In "A100-SXM4-80GB" and in "a100-80", not in "h100-8"."""


def known_device(name: str) -> Device | None:
    """Returns the device called so, by its driver or by people ("A100-80GB"); None for one that is not known."""
    words = name.upper().replace("-", " ").split()
    for known, device in _DEVICES.items():
        parts = known.upper().split()
        if any(words[i : i + len(parts)] == parts for i in range(len(words))):
            memory = None if known in _WITH_HOST else _MEMORY.search(name.upper())
            return device if memory is None else replace(device, memory=int(memory[1] or memory[2]) * 10**9)
    return None


_MOST = 1e6
"""GPUs of a machine, or dollars an hour; what is above is a slip of the pen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A row of the file: a machine, or several of them joined by a network."""

    device: str
    gpus: int
    """Of one machine."""
    price: float
    """Of one for an hour, on demand."""
    spot: float | None
    """The same as a spot machine; None where there are none."""
    tflops: float
    memory_gb: float
    """Of a GPU."""
    within_gbit: float
    """Between GPUs of a machine, each way."""
    network_gbit: float | None
    """Of a machine's card, each way; None where nobody has said it."""
    accelerator: str
    """SkyPilot's name."""
    cloud: str
    count: int = 1
    """Machines."""

    @property
    def all_gpus(self) -> int:
        """Of all machines."""
        return self.gpus * self.count

    @property
    def name(self) -> str:
        """In words."""
        where = f" {self.cloud}" if self.cloud else ""
        return f"{self.device} x{self.all_gpus}{where}" + (f", {self.count} machines" if self.count > 1 else "")


_NUMBERS = ("gpus", "price", "spot", "tflops", "memory_gb", "within_gbit", "network_gbit")
_TEXTS = ("device", "accelerator", "cloud")


def read_prices(path: Path) -> tuple[Machine, ...]:
    """Returns the machines of a CSV file: `device,gpus,price` and what else is known (docs/cost.md).

    Raises: ConfigError that names line, column and value.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(line for line in file if not line.lstrip().startswith("#")) if row]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as prices: {error}") from None
    head = [cell.strip() for cell in rows[0]] if rows else []
    unknown = [name for name in head if name not in (*_NUMBERS, *_TEXTS)]
    if not {"device", "gpus", "price"} <= set(head) or unknown or len(rows) < 2:
        wrong = f"has a column {unknown[0]!r}" if unknown else "is not"
        columns = ", ".join((*_TEXTS, *_NUMBERS))
        raise ConfigError(f"{path} {wrong}: a line device,gpus,price,.. and a machine a line; columns are {columns}")
    if twice := [name for name in head if head.count(name) > 1]:
        raise ConfigError(f"{path} has two columns {twice[0]!r}; leave one of them out")
    for n, row in enumerate(rows[1:], 1):
        if len(row) > len(head):
            raise ConfigError(
                f"{path}: machine {n} has {len(row)} values, and there are {len(head)} columns; numbers are written "
                "with a point (29.40)"
            )
    return tuple(
        _machine(dict(zip(head, row, strict=False)), f"machine {n}", path) for n, row in enumerate(rows[1:], 1)
    )


def _machine(row: dict[str, str], where: str, path: Path) -> Machine:
    said = {name: text.strip() for name, text in row.items() if text.strip()}
    known = known_device(said.get("device", ""))

    def number(name: str, default: float | None = None) -> float | None:
        told = Field(_number(said[name]) if name in said else None, f"{where}: {name}", str(path))
        return default if name not in said else told.number(above=0.0, most=_MOST)

    def needed(name: str, default: float | None = None) -> float:
        found = number(name, default)
        if found is None:
            of = f"; {said.get('device', '')!r} is not among those known: {', '.join(KNOWN)}" if name in _SHEET else ""
            raise ConfigError(f"{path}: {where} has no {name}; fill in that column{of}")
        return found

    if not re.fullmatch(r"[\w.-]+", said.get("device", "")):
        raise Field(said.get("device", ""), f"{where}: device", str(path)).wrong("a name such as a100-80")
    return Machine(
        device=said["device"],
        gpus=Field(needed("gpus"), f"{where}: gpus", str(path)).whole(least=1),
        price=needed("price"),
        spot=number("spot"),
        tflops=needed("tflops", known.flops_16_bit / 1e12 if known else None),
        memory_gb=needed("memory_gb", known.memory / 1e9 if known else None),
        within_gbit=needed("within_gbit", known.within * 8 / 1e9 if known else None),
        network_gbit=number("network_gbit"),
        accelerator=said.get("accelerator", said["device"].upper()),
        cloud=said.get("cloud", ""),
    )


_SHEET = ("tflops", "memory_gb", "within_gbit")


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def choose_machines(text: str, machines: Sequence[Machine]) -> list[Machine]:
    """Returns the cheapest machines for each of `a100-80:8,h100:16`: a kind, and how many GPUs. Raises: ConfigError."""
    found = []
    for part in text.split(","):
        told = re.fullmatch(r"([\w.-]+):([1-9]\d{0,6})", part.strip())
        if told is None:
            raise ConfigError(f"--devices {part.strip()!r} names no GPUs; write KIND:COUNT, such as a100-80:8")
        kind, count = told[1], int(told[2])
        same = [one for one in machines if one.device == kind]
        if not same:
            names = ", ".join(dict.fromkeys(one.device for one in machines))
            raise ConfigError(f"--devices {part.strip()}: no machine in --prices has {kind}; there are {names}")
        fit = [replace(one, count=count // one.gpus) for one in same if count % one.gpus == 0]
        if not fit:
            sizes = ", ".join(sorted({str(one.gpus) for one in same}, key=int))
            raise ConfigError(
                f"--devices {part.strip()}: machines with {kind} have {sizes} GPUs; take a multiple of it"
            )
        best = min(fit, key=lambda one: (one.price * one.count, one.count))
        if best.count > 1 and best.network_gbit is None:
            raise ConfigError(
                f"--devices {part.strip()} are {best.count} machines; --prices must say network_gbit of them"
            )
        found.append(best)
    if len({(one.device, one.all_gpus) for one in found}) < len(found):
        raise ConfigError(f"--devices {text}: each kind and number of GPUs may be named once")
    return found
