"""The drop-in for transformers' Trainer and TrainingArguments."""

from fold3d.trainer.arguments import TrainingArguments
from fold3d.trainer.bases import Seq2SeqTrainer, Seq2SeqTrainingArguments, arguments_class, trainer_class
from fold3d.trainer.trainer import Trainer

__all__ = [
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "arguments_class",
    "trainer_class",
]
