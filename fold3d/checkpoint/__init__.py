"""Checkpoints in the stock Trainer's folder layout, under any dp, pp and segments."""

from fold3d.checkpoint import manifest
from fold3d.checkpoint.adapters import adapter_files, has_adapters, load_adapters
from fold3d.checkpoint.consensus import together
from fold3d.checkpoint.folder import CheckpointFolder, remove_stale
from fold3d.checkpoint.late_gradients import LateGradientsFile, LateGradientsSink
from fold3d.checkpoint.optimizer import OptimizerLayout, OptimizerSink
from fold3d.checkpoint.stream import Stream
from fold3d.checkpoint.weights import HostSink, WeightsSink, load_weights

__all__ = [
    "CheckpointFolder",
    "HostSink",
    "LateGradientsFile",
    "LateGradientsSink",
    "OptimizerLayout",
    "OptimizerSink",
    "Stream",
    "WeightsSink",
    "adapter_files",
    "has_adapters",
    "load_adapters",
    "load_weights",
    "manifest",
    "remove_stale",
    "together",
]
