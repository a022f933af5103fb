"""What the executor's Offloader is told, and what is checked before anything is built."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fold3d import _C
from fold3d.config import AUTO, ParallelConfig, text_of_bytes
from fold3d.device import processes_of_host
from fold3d.errors import ConfigError
from fold3d.plan.programs import Programs
from fold3d.plan.space.offload import KNOB as OFFLOAD
from fold3d.plan.space.offload import offloaded_chunks
from fold3d.plan.space.recompute import KNOB as RECOMPUTE
from fold3d.plan.strategy import Strategy
from fold3d.profile.stashes import stashes_of
from fold3d.sharding.plan import ShardingPlan
from fold3d.stage.micro_batch import MicroBatch
from fold3d.trace import Trace

logger = logging.getLogger(__name__)

Keeps = Callable[[Sequence[MicroBatch]], None]
"""Told of the micro-batches of a run before it begins."""


def check_folder(config: ParallelConfig) -> None:
    """Raises ConfigError for a folder of the pool that this process cannot write to."""
    disk = config.offload_disk
    if disk is not None and not (os.path.isdir(disk) and os.access(disk, os.W_OK)):
        raise ConfigError(f"offload_disk={disk!r}: must be a folder that this process can write to")


def check_pool(config: ParallelConfig, strategy: Strategy, expected: int = 0) -> None:
    """Checks that this host can hold the pools of its processes; before any of them has reserved one, else what is left
    is no longer for all of them.

    Args:
        expected: bytes that the plan has in the fullest pool.
    Raises: ConfigError for a pool that this host cannot hold.
    """
    if not offloaded_chunks(strategy):
        return
    size, disk = config.pool_size, config.offload_disk
    here = processes_of_host()  # each has a pool of its own
    there = room_for_pools(config)
    if (expected if size is None else size) * here <= there:
        return
    left = f"{text_of_bytes(there)} of memory left" if disk is None else f"{text_of_bytes(there)} free in {disk}"
    share = f" for {here} processes" if here > 1 else ""
    lack = f"the host has {left}{share}; "
    where = "set offload_disk to a folder of a fast disk" if disk is None else "name another folder"
    if size is not None:
        raise ConfigError(f"offload_pool={config.offload_pool}: {lack}lower it, or {where}")
    raise ConfigError(
        f'offload_pool="auto": the plan has up to {text_of_bytes(expected)} in a pool, and {lack}let less leave '
        f"(setting offload), or {where}"
    )


def room_for_pools(config: ParallelConfig) -> int:
    """Returns how many bytes the pools of this host's processes can have together."""
    return _C.available_host_bytes() if config.offload_disk is None else shutil.disk_usage(config.offload_disk).free


def offload_options(config: ParallelConfig, strategy: Strategy, expected: int = 0) -> _C.OffloadOptions | None:
    """Returns how stashes leave the device; None where none does.

    Args:
        expected: bytes that the plan has in this rank's pool; reserved at once where the user has not said how many.
    """
    if not offloaded_chunks(strategy):
        return None
    packs = config.kernels == "fold3d"
    return _C.OffloadOptions(config.pool_size or 0, config.offload_disk or "", expected_bytes=expected, packs=packs)


def refuse_without_effect(config: ParallelConfig, *, decided: bool) -> None:
    """Raises ConfigError for a pool that nothing will ever lie in.

    Args:
        decided: whether somebody has decided what offload="auto" is.
    """
    if config.offload != AUTO or decided:
        return
    for name, value in config.of_pool().items():
        raise ConfigError(
            f'{name}={value!r} has no effect: with offload="auto" stashes leave under a memory_limit only, and on '
            'the CPU with offload_disk only; set offload to "activations" or "boundaries"'
        )


def prove_room(
    config: ParallelConfig,
    strategy: Strategy,
    model: Module,
    recording: Trace | None,
    example: Mapping[str, Any] | None,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    sharding: ShardingPlan | None = None,
) -> None:
    """Proves, before training, that a pool of a fixed size has room at every moment of a step, as far as it is known
    what a micro-batch puts there.

    Args:
        model, recording, example, device, autocast, sharding: as `stashes_of`; without a recording nothing is known.
    Raises: ConfigError for a pool that cannot be enough, however fast copies are.
    """
    if config.pool_size is None or recording is None or example is None or not offloaded_chunks(strategy):
        return
    try:
        known = stashes_of(
            *(model, recording, example, strategy.ranges, strategy.pp, RECOMPUTE.of(strategy)),
            device=device,
            autocast=autocast,
            sharding=sharding,
        )
    except Exception as error:  # whatever a model raises on tensors without values
        logger.info("what leaves for the pool is not known before it does (%s: %s)", type(error).__name__, error)
        return
    program = Programs.of(strategy).training(config.micro_batches)
    pools = _C.least_pools(program, known.kept, known.sent)
    needed = max(pools)
    if needed > config.pool_size:
        raise ConfigError(
            f"offload_pool={config.offload_pool}: stage {pools.index(needed)} puts at least {text_of_bytes(needed)} "
            "there at the same time, with micro-batches like the first; raise it, leave it at "
            f'"auto", or let less leave (offload="{replace(OFFLOAD.of(strategy), percent=50)}", recompute)'
        )


def keeper(executor: _C.Executor, model: Module) -> Keeps:
    """Returns what tells `executor` of the memory that stays where it is, whatever a graph saves of it: parameters and
    buffers of `model`, and the batch, which live on anyway."""

    def keep(micro_batches: Sequence[MicroBatch]) -> None:
        batch = [value for one in micro_batches for value in one.inputs.values() if isinstance(value, Tensor)]
        executor.keep([*model.parameters(), *model.buffers(), *batch])

    return keep
