"""known_device(): what NVIDIA's data sheets say of a device that is named."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


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

    def peak(self, dtype: str) -> float:
        """Returns the FLOPs per second in "float32", "bfloat16" or "float16"."""
        return self.flops_float32 if dtype == "float32" else self.flops_16_bit


_DEVICES = {
    "B200": Device(2250e12, 75e12, 180 * 10**9, 900e9, 64e9),
    "GH200": Device(989e12, 67e12, 96 * 10**9, 450e9, 450e9),
    "H200": Device(989e12, 67e12, 141 * 10**9, 450e9, 64e9),
    "H100 PCIe": Device(756e12, 51e12, 80 * 10**9, 64e9, 64e9),
    "H100 NVL": Device(835e12, 60e12, 94 * 10**9, 64e9, 64e9),
    "H100": Device(989e12, 67e12, 80 * 10**9, 450e9, 64e9),
    "H800": Device(989e12, 67e12, 80 * 10**9, 200e9, 64e9),
    "A100": Device(312e12, 19.5e12, 40 * 10**9, 300e9, 32e9),
    "A800": Device(312e12, 19.5e12, 80 * 10**9, 200e9, 32e9),
    "A30": Device(165e12, 10.3e12, 24 * 10**9, 32e9, 32e9),
    "L40S": Device(362e12, 91.6e12, 48 * 10**9, 32e9, 32e9),
    "L4": Device(121e12, 30.3e12, 24 * 10**9, 32e9, 32e9),
    "V100": Device(125e12, 15.7e12, 16 * 10**9, 150e9, 16e9),
    "T4": Device(65e12, 8.1e12, 16 * 10**9, 16e9, 16e9),
}
"""The first name that occurs in the device's counts."""
KNOWN = tuple(_DEVICES)
_MEMORY = re.compile(r"\b(\d+) ?(GB|$)")
"""In "A100-SXM4-80GB" and in "a100-80"."""


def known_device(name: str) -> Device | None:
    """Returns the device called so, by its driver or by people ("A100-80GB"); None for one that is not known."""
    words = name.upper().replace("-", " ").split()
    for known, device in _DEVICES.items():
        parts = known.upper().split()
        if any(words[i : i + len(parts)] == parts for i in range(len(words))):
            memory = _MEMORY.search(name.upper())
            return device if memory is None else replace(device, memory=int(memory[1]) * 10**9)
    return None
