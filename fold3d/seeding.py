"""Dropout seeds that depend on (seed, step, micro-batch, module) and never on the layout.

Every block, and every module around the blocks, gets a new seed when it starts and another one when it ends
(for code between modules). Both are hashes of the seed at the end of the module before and of the module's
name, so the seeds between modules form a chain.
Every chunk passes the same modules in the same order until it leaves, running some and skipping others, so
the chain is the same in every layout. A module that another one runs (a dropout that the blocks share) draws as
that one's own code: it is not run where the other one is skipped.

The chain is kept in the generator itself, as its seed. torch.utils.checkpoint saves and restores the
generator's state, seed included, so a module that is run again inside a checkpoint in backward finds the seed
that it had in forward. The upper 16 bits tell whether the generator carries the chain or is inside a module.
"""

from __future__ import annotations

import hashlib

import torch

from fold3d._C import is_between, next_seed
from fold3d.device import is_accelerator


def constant_of(text: str) -> int:
    """Returns a 64-bit constant of `text`: the same in every process and version of Python."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def start(key: tuple[int, int, int]) -> int:
    """Returns the first seed of the chain of `key` = (seed, step, global micro-batch)."""
    value = 0x9E3779B97F4A7C15
    for part in key:
        value = next_seed(value, (part * 0x9E3779B97F4A7C15) % (1 << 64))
    return value


def carried() -> int | None:
    """Returns the seed of the chain that the CPU generator carries, None if it carries none or is inside a module."""
    seed = torch.default_generator.initial_seed()
    return seed if is_between(seed) else None


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Returns the generators that modules on `device` draw from: the CPU's and the device's own."""
    if not is_accelerator(device):
        return [torch.default_generator]
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    module = torch.get_device_module(device)
    if hasattr(module, "init"):  # else it has none yet
        module.init()
    return [torch.default_generator, module.default_generators[index]]
