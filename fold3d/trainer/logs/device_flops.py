"""Peak speed of GPUs, for the share of it that training uses (MFU)."""

from __future__ import annotations

import torch

_DENSE_16_BIT = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
}
"""FLOPs per second of tensor cores with 16-bit inputs, without sparsity, from NVIDIA's data sheets. The first name that
occurs in the device's counts."""


def peak_flops(device: torch.device, mixed_precision: str) -> float | None:
    """Returns the device's FLOPs per second in the precision in use; None where that is not known.

    Args:
        mixed_precision: "bf16", "fp16" or "no", as accelerate says.
    """
    if device.type != "cuda" or mixed_precision not in ("bf16", "fp16"):
        return None
    return flops_of(torch.cuda.get_device_name(device))


def flops_of(name: str) -> float | None:
    """Returns the FLOPs per second of a device called so by its driver, None for one that is not known."""
    words = name.replace("-", " ").split()
    for known, flops in _DENSE_16_BIT.items():
        parts = known.split()
        if any(words[i : i + len(parts)] == parts for i in range(len(words))):
            return flops
    return None
