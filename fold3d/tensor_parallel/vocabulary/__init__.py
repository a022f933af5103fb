"""Vocabulary parallelism: embeddings, output heads and losses of which each rank of a group holds some columns.

The way is Megatron's (Shoeybi et al., 2019, section 3); what is new is that models and loss functions stay as they are.
"""

from __future__ import annotations

from fold3d.tensor_parallel.vocabulary.install import install_vocabulary
from fold3d.tensor_parallel.vocabulary.logits import VocabularyParallelLogits, gathered

__all__ = ["VocabularyParallelLogits", "gathered", "install_vocabulary"]
