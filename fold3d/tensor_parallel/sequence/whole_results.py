"""WholeResults: parts of hidden states that a model returns, such as all blocks' results, are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fold3d.tensor_parallel.sequence.block_sequence import BlockSequence
from fold3d.trace.arguments import ancestors


def put_together(model: nn.Module, blocks: Mapping[str, BlockSequence]) -> Callable[[], None]:
    """Has the model, and what holds its blocks, return whole hidden states; returns what ends that."""
    sequences = list(blocks.values())
    handles = [
        model.get_submodule(name).register_forward_hook(_Results(sequences), prepend=True) for name in ancestors(blocks)
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class _Results:
    """The hook of one module. That of a copy of it, deep or pickled, does nothing."""

    def __init__(self, sequences: list[BlockSequence]) -> None:
        self._sequences = sequences

    def __reduce__(self) -> tuple[Any, ...]:
        return _Results, ([],)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        parts = {
            id(part): sequence
            for sequence in self._sequences
            for ref in sequence.returned
            if (part := ref()) is not None
        }
        found: list[int] = []

        def change(x: Tensor) -> Tensor:
            sequence = parts.get(id(x))
            if sequence is None:
                return x
            found.append(id(x))
            return sequence.whole(x)

        changed = tree_map_only(Tensor, partial(change), output)
        return changed if found else None
