"""The drop-in for transformers' Trainer and TrainingArguments."""

from fold3d.trainer.arguments import TrainingArguments
from fold3d.trainer.bases import arguments_class, trainer_class
from fold3d.trainer.trainer import Trainer

__all__ = ["Trainer", "TrainingArguments", "arguments_class", "trainer_class"]
