"""auto_find_batch_size: all ranks find out together that a batch size needs more memory than there is."""

from __future__ import annotations

import gc

import torch
from accelerate.utils.memory import should_reduce_batch_size

from fold3d.engine.engine import Engine
from fold3d.errors import ConfigError, MemoryLimitError, RankError
from fold3d.observe.memory import is_out_of_memory

_KINDS = (MemoryError.__name__, torch.OutOfMemoryError.__name__)
"""What a rank tells the others of running out of memory."""


def needs_smaller_batch(error: BaseException) -> bool:
    """Returns whether `error`, which this rank raises, says that memory ran out on some rank; the same on every rank
    of a failure that all of them raise."""
    if isinstance(error, RankError):
        return any(f": {kind}: " in str(error) for kind in _KINDS)
    if isinstance(error, MemoryLimitError) or is_out_of_memory(error):
        return True
    return isinstance(error, Exception) and should_reduce_batch_size(error)


def try_again(engine: Engine, told: str, batch_size: int, has_stepped: bool, timeout: float) -> RuntimeError:
    """Makes the engine usable again after memory ran out on some rank; all ranks call.

    Args:
        told: the error.
        has_stepped: whether this rank's optimizer has been asked to step in this training.
        timeout: seconds to wait for the other ranks.
    Returns: what makes accelerate's `find_executable_batch_size` go on with a smaller size.
    Raises: ConfigError on every rank of several when some rank's optimizer has stepped.
    """
    gc.collect()  # what the failed step had kept
    engine.recover()
    stepped = torch.tensor(has_stepped)
    engine.world.all_reduce(stepped, torch.logical_or, timeout=timeout)
    if stepped and engine.topology.world > 1:
        raise ConfigError(
            f"auto_find_batch_size={batch_size} fitted at first and does not any more, when weights had been updated: "
            "a step that ends in the middle leaves them different on each rank. Set per_device_train_batch_size to "
            f"less and resume from the last checkpoint. {told}"
        )
    return RuntimeError(f"batch size {batch_size} needs more memory than there is: out of memory. {told}")
