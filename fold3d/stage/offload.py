"""offload_options(): what the executor's Offloader is told, checked before anything is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Module

from fold3d import _C
from fold3d.config import AUTO, ParallelConfig, text_of_bytes
from fold3d.device import processes_of_host
from fold3d.errors import ConfigError
from fold3d.plan.space.offload import offloaded_chunks
from fold3d.plan.strategy import Strategy
from fold3d.stage.micro_batch import MicroBatch

Keeps = Callable[[Sequence[MicroBatch]], None]
"""Told of the micro-batches of a run before it begins."""


def offload_options(config: ParallelConfig, strategy: Strategy) -> _C.OffloadOptions | None:
    """Returns how stashes leave the device; None where none does.

    Raises: ConfigError for a pool that this host cannot hold, and for a folder that nobody can write to.
    """
    if not offloaded_chunks(strategy):
        return None
    size, disk = config.pool_size, config.offload_disk
    if disk is not None and not (os.path.isdir(disk) and os.access(disk, os.W_OK)):
        raise ConfigError(f"offload_disk={disk!r}: must be a folder that this process can write to")
    here = processes_of_host()  # each has a pool of its own
    if disk is None and size is not None and size * here > (there := _C.available_host_bytes()):
        raise ConfigError(
            f"offload_pool={config.offload_pool}: the host has {text_of_bytes(there)} of memory left"
            f"{f' for {here} processes' if here > 1 else ''}; lower it, or set offload_disk to a folder of a fast disk"
        )
    return _C.OffloadOptions(size or 0, disk or "", packs=config.kernels == "fold3d")


def refuse_without_effect(config: ParallelConfig, *, decided: bool) -> None:
    """Raises ConfigError for a pool that nothing will ever lie in.

    Args:
        decided: whether somebody has decided what offload="auto" is.
    """
    if config.offload != AUTO or decided:
        return
    for name, default in (("offload_pool", AUTO), ("offload_disk", None)):
        value = getattr(config, name)
        if value != default:
            raise ConfigError(
                f'{name}={value!r} has no effect: with offload="auto" stashes leave under a memory_limit only, and on '
                'the CPU with offload_disk only; set offload to "activations" or "boundaries"'
            )


def keeper(executor: _C.Executor, model: Module) -> Keeps:
    """Returns what tells `executor` of the memory that stays where it is, whatever a graph saves of it: parameters and
    buffers of `model`, and the batch, which live on anyway."""

    def keep(micro_batches: Sequence[MicroBatch]) -> None:
        batch = [value for one in micro_batches for value in one.inputs.values() if isinstance(value, Tensor)]
        executor.keep([*model.parameters(), *model.buffers(), *batch])

    return keep
