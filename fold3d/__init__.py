"""fold3d: trains HuggingFace models with data, tensor and pipeline parallelism on ordinary networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fold3d.config import ParallelConfig
from fold3d.errors import (
    CheckpointError,
    ConfigError,
    Fold3dError,
    MissingWeightsError,
    RankError,
    SplitError,
    TraceError,
)

if TYPE_CHECKING:
    from fold3d.engine.engine import Engine
    from fold3d.trainer import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        Trainer,
        TrainingArguments,
        arguments_class,
        trainer_class,
    )
    from fold3d.trainer.rates import RatesCallback
    from fold3d.weights.empty import empty_weights

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "Engine",
    "Fold3dError",
    "MissingWeightsError",
    "ParallelConfig",
    "RankError",
    "RatesCallback",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "SplitError",
    "TraceError",
    "Trainer",
    "TrainingArguments",
    "arguments_class",
    "empty_weights",
    "trainer_class",
]

_LAZY = {
    "Engine": "fold3d.engine.engine",
    "RatesCallback": "fold3d.trainer.rates",
    "Seq2SeqTrainer": "fold3d.trainer",
    "Seq2SeqTrainingArguments": "fold3d.trainer",
    "Trainer": "fold3d.trainer",
    "TrainingArguments": "fold3d.trainer",
    "arguments_class": "fold3d.trainer",
    "empty_weights": "fold3d.weights.empty",
    "trainer_class": "fold3d.trainer",
}


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import; `fold3d draw` and the Engine do not need it.
    if name not in _LAZY:
        raise AttributeError(f"module 'fold3d' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
