"""install_vocabulary(): puts the forwards of embeddings and heads in parts on the modules of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fold3d.sharding.vocabulary import Vocabulary
from fold3d.tensor_parallel.region import REDUCE, RegionOps
from fold3d.tensor_parallel.vocabulary.column_parallel import Columns
from fold3d.tensor_parallel.vocabulary.logits import VocabularyParallelLogits
from fold3d.trace.coat import Coat, Wrap


def parallel_lookup(module: nn.Embedding, columns: Columns, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward of a module whose weight holds this rank's rows.

    Each rank looks up the tokens that it has, and zeros for others; the sum over the ranks is the whole. Rows of
    `padding_idx` get no gradient, as in the whole.

    Args:
        original: its forward; one of its class's own, which scales what it looks up, say, runs as it is.
    """

    def plain(input: Tensor) -> Tensor:
        index, mine = columns.own(input)
        found = functional.embedding(index, module.weight, _padding(module.padding_idx, columns))
        return columns.ops.exchange(found.masked_fill(~mine.unsqueeze(-1), 0), REDUCE)

    def own(*args: Any, **kwargs: Any) -> Tensor:
        with _LocalLookup(module.weight, columns) as lookup:
            found = original(*args, **kwargs)
        return columns.ops.exchange(found.masked_fill(~lookup.mine().unsqueeze(-1), 0), REDUCE)

    return plain if getattr(original, "__func__", None) is nn.Embedding.forward else own


class _LocalLookup(TorchFunctionMode):
    """While it lasts, `embedding` of this weight takes numbers of tokens and looks them up among this rank's rows."""

    def __init__(self, weight: Tensor, columns: Columns) -> None:
        super().__init__()
        self._weight, self._columns = weight, columns
        self._mine: Tensor | None = None

    def mine(self) -> Tensor:
        """Returns which tokens this rank has. Raises: RuntimeError when the table was not looked into."""
        if self._mine is None:
            raise RuntimeError("an embedding spread over a tensor-parallel group returned without a lookup")
        return self._mine

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.embedding or args[1] is not self._weight:
            return func(*args, **kwargs)
        index, self._mine = self._columns.own(args[0])
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
        return func(index, self._weight, _padding(padding, self._columns))


def _padding(index: int | None, columns: Columns) -> int | None:
    """Returns where the row of the padding lies here; None where it does not."""
    return index - columns.first if index is not None and columns.first <= index < columns.end else None


def install_vocabulary(coat: Coat, model: nn.Module, vocabulary: Vocabulary, ops: RegionOps) -> None:
    """Makes the modules that `vocabulary` spreads work on the rows that rank `ops.rank` holds.

    Only forwards of instances are put on, no class is changed. The parameters (`vocabulary.shards`) are cut by the
    caller, before or after, and hold `Shard.take` of the whole when a forward runs.
    """
    for name, shard in vocabulary.embeddings.items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Embedding)
        coat.put(Wrap.VOCABULARY, module, parallel_lookup(module, Columns(shard, ops), module.forward))
    for name, shard in vocabulary.heads.items():
        module = model.get_submodule(name)
        coat.put(Wrap.VOCABULARY, module, _parallel_head(Columns(shard, ops), module.forward))


def _parallel_head(columns: Columns, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        part = original(columns.share(input), *args, **kwargs)
        return VocabularyParallelLogits.of(part, columns, part.ndim - 1)

    return forward
