"""put_together(): a model returns whole what its ranks have in parts: hidden states, attention weights, routers'
logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fold3d.tensor_parallel.results.parts import Parts
from fold3d.trace.arguments import ancestors


def put_together(model: nn.Module, blocks: Iterable[str], parts: Sequence[Parts]) -> Callable[[], None]:
    """Has the model, and what holds its blocks, return the whole of these parts; returns what ends that.

    Only of what is returned as it is: what code in between computes of a part stays one.
    """
    handles = [
        model.get_submodule(name).register_forward_hook(_Results(parts), prepend=True) for name in ancestors(blocks)
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


class _Results:
    """The hook of one module. That of a copy of it, deep or pickled, does nothing."""

    def __init__(self, parts: Sequence[Parts]) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _Results, ([],)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        ways = {id(part): (part, whole) for parts in self._parts for part, whole in parts}
        if not ways:
            return None
        made: dict[int, Tensor] = {}

        def change(x: Tensor) -> Tensor:
            if id(x) not in ways:
                return x
            if id(x) not in made:
                made[id(x)] = ways[id(x)][1](x)
            return made[id(x)]

        changed = tree_map_only(Tensor, change, output)
        return changed if made else None
