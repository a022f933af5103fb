"""Checkpoints in the stock Trainer's folder layout, under any dp, pp and segments."""

from fold3d.checkpoint import manifest
from fold3d.checkpoint.background import Background, Part
from fold3d.checkpoint.delivery import Delivery, sees_folder, write_all
from fold3d.checkpoint.folder import CheckpointFolder, last_committed, remove_stale
from fold3d.checkpoint.names import adapter_files, has_adapters, load_adapters
from fold3d.checkpoint.optimizer import OptimizerFiles, OptimizerLayout
from fold3d.checkpoint.regions import regions_of
from fold3d.checkpoint.torch_file import reading
from fold3d.checkpoint.weights import LATE_GRADIENTS, WeightsFiles, filling_late, load_weights, remove_unfinished
from fold3d.comms.consistency import together

__all__ = [
    "LATE_GRADIENTS",
    "Background",
    "CheckpointFolder",
    "Delivery",
    "OptimizerFiles",
    "OptimizerLayout",
    "Part",
    "WeightsFiles",
    "adapter_files",
    "filling_late",
    "has_adapters",
    "last_committed",
    "load_adapters",
    "load_weights",
    "manifest",
    "reading",
    "regions_of",
    "remove_stale",
    "remove_unfinished",
    "sees_folder",
    "together",
    "write_all",
]
