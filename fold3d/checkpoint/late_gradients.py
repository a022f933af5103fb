"""late_gradients.safetensors: the gradients of the last step before the checkpoint, where gradient_delay=1 keeps them.

By canonical name, whole, as they are kept in memory, of what was used. The settings that they will be taken with are in
fold3d.json. Versions of weights that later steps need are there, too: "NAME@1" is that of one update ago, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from fold3d.data_parallel.late.weight_versions import parameter_of
from fold3d.errors import CheckpointError
from fold3d.weights.parts import Parts
from fold3d.weights.pretrained import PretrainedFolder

STEM = "late_gradients"


def filling_late(folder: Path, parts: Parts) -> Callable[[str, Tensor], bool]:
    """Returns what fills this rank's part of a parameter's gradient, or of a version of it, from a checkpoint, and
    returns whether it is there; it raises CheckpointError for one of another shape.

    Args:
        parts: which part of each gradient is read.
    Raises: CheckpointError for a file that is missing or damaged.
    """
    source = PretrainedFolder(folder, STEM)
    names = set(source.keys())

    def fill(name: str, gradient: Tensor) -> bool:
        if name not in names:
            return False
        parameter = parameter_of(name)
        whole, found = parts.whole_shape(parameter, gradient.shape), source.shape(name)
        if found != whole:
            raise CheckpointError(
                f"{folder} belongs to another model: the late gradient of {name} has shape {found}, and {whole} here"
            )
        source.read_into(name, gradient, parts.shard_of(parameter), parts.rank)
        return True

    return fill
