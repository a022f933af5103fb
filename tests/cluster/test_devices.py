"""Devices by their names."""

from __future__ import annotations

import pytest

from fold3d.cluster.devices import known_device


@pytest.mark.parametrize(
    ("name", "peak", "gigabytes"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 80),
        ("a100", 312e12, 40),
        ("NVIDIA H100 80GB HBM3", 989e12, 80),
        ("H100 PCIe", 756e12, 80),
        ("V100-32GB", 125e12, 32),
        ("a100-80", 312e12, 80),
        ("Tesla T4", 65e12, 16),
    ],
)
def test_what_is_known(name: str, peak: float, gigabytes: int) -> None:
    device = known_device(name)
    assert device is not None and device.peak("bfloat16") == peak and device.memory == gigabytes * 10**9
    assert device.peak("float32") < peak


def test_what_is_not() -> None:
    assert known_device("NVIDIA GeForce GTX 1080") is None and known_device("A1000") is None
