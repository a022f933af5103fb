"""install_vocabulary(): puts the forwards of embeddings and heads in parts on the modules of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fold3d.sharding.vocabulary import Vocabulary
from fold3d.tensor_parallel.region import RegionOps
from fold3d.tensor_parallel.vocabulary.columns import Columns
from fold3d.tensor_parallel.vocabulary.embedding import parallel_lookup
from fold3d.tensor_parallel.vocabulary.logits import VocabularyParallelLogits
from fold3d.trace.wrappers import wrap


def install_vocabulary(model: nn.Module, vocabulary: Vocabulary, ops: RegionOps) -> Callable[[], None]:
    """Makes the modules that `vocabulary` spreads work on the rows that rank `ops.rank` holds.

    Only forwards of instances are put on, no class is changed. The parameters (`vocabulary.shards`) are cut by the
    caller, before or after, and hold `Shard.take` of the whole when a forward runs.

    Returns: what takes the forwards off again.
    """
    undo: list[Callable[[], None]] = []
    for name, shard in vocabulary.embeddings.items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Embedding)
        undo.append(wrap(module, parallel_lookup(module, Columns(shard, ops), module.forward)))
    for name, shard in vocabulary.heads.items():
        module = model.get_submodule(name)
        undo.append(wrap(module, _parallel_head(Columns(shard, ops), module.forward)))

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove


def _parallel_head(columns: Columns, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        part = original(columns.share(input), *args, **kwargs)
        return VocabularyParallelLogits.of(part, columns, part.ndim - 1)

    return forward
