"""compare_arguments(), compare_lengths(): all processes train with the same arguments, and as many batches."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers.trainer_utils import has_length

from fold3d.comms.consistency import compare
from fold3d.comms.world_group import WorldGroup
from fold3d.trainer.arguments import TrainingArguments

_PLACES = ("local_rank", "output_dir", "logging_dir", "resume_from_checkpoint", "weights", "offload_disk")
"""Which process it is, and where it finds things: hosts may have other folders."""
_REPORTS = (
    *(
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "debug",
    ),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics", "push_to_hub"),
    *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
)
"""What it says, and to whom."""
_READING = (
    *("dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    "dataloader_multiprocessing_context",
)
"""How it reads data, not which."""
_NOT_READ = (
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "do_train", "do_eval", "do_predict"),
)
"""Of distributed training that fold3d does itself; for scripts alone."""
OWN = frozenset((*_PLACES, *_REPORTS, *_READING, *_NOT_READ))
"""Arguments that may differ between processes."""


def compare_arguments(args: TrainingArguments, world: WorldGroup) -> None:
    """All ranks of the job call when a training begins.

    Of a class with further arguments, those of fold3d and the stock Trainer are compared.

    Raises: ConfigError on every rank, which names the argument, the ranks and the values.
    """
    named = (field.name for field in fields(TrainingArguments) if field.init and field.name not in OWN)
    compare(world, {name: _text(getattr(args, name)) for name in named})


def compare_lengths(what: str, loader: Any, world: WorldGroup) -> None:
    """All ranks of the job call before batches are drawn.

    Raises: ConfigError on every rank where they have another number of batches, as far as that is known.
    """
    compare(world, {f"the number of batches of {what}": str(len(loader)) if has_length(loader) else "unknown"})


def _text(value: Any) -> str:
    """Returns a value in words that are the same in all processes: without addresses of objects."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(getattr(value, "value", value))  # of an enum
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_text, value)) + "]"
    if hasattr(value, "to_dict"):
        return _text(value.to_dict())
    return f"{type(value).__qualname__}({getattr(value, 'value', '')})"
