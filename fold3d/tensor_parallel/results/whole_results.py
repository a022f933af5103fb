"""put_together(): a model returns whole what its ranks have in parts: hidden states, attention weights, routers'
logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fold3d.tensor_parallel.results.lazy_whole import LazyWhole
from fold3d.tensor_parallel.results.parts import Parts, PutTogether
from fold3d.trace.arguments import ancestors


def put_together(model: nn.Module, blocks: Iterable[str], parts: Sequence[Parts]) -> Callable[[], None]:
    """Has the model, and what holds its blocks, return the whole of these parts; returns what ends that.

    Of hidden states and of what hooks collect only what is returned as it is: what code in between computes of a part
    stays one.
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
        put = _PuttingTogether({id(part): (part, whole) for parts in self._parts for part, whole in parts})
        changed = put.of(output)
        return changed if put.made else None


class _PuttingTogether:
    """Of what one call of a module returned."""

    def __init__(self, ways: dict[int, tuple[Tensor, PutTogether]]) -> None:
        self.made: dict[int, Tensor] = {}
        """Whole tensors, by the identity of the part."""
        self._ways = ways
        self._seen: set[int] = set()

    def of(self, output: Any) -> Any:
        """Returns the output with whole tensors. Objects of the model's own classes are changed in place."""
        return tree_map(self._change, output)

    def _change(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in self.made:
                if isinstance(leaf, LazyWhole):
                    self.made[id(leaf)] = leaf.whole()
                elif id(leaf) in self._ways:
                    self.made[id(leaf)] = self._ways[id(leaf)][1](leaf)
            return self.made.get(id(leaf), leaf)
        if _is_users(leaf) and id(leaf) not in self._seen:
            self._seen.add(id(leaf))
            for name in [field.name for field in fields(leaf)] if is_dataclass(leaf) else list(vars(leaf)):
                before = len(self.made)
                changed = self.of(getattr(leaf, name, None))
                if len(self.made) > before:
                    object.__setattr__(leaf, name, changed)
        return leaf


def _is_users(leaf: Any) -> bool:
    """Whether it is an object that somebody has made to hold results: none of a library's, such as a cache, and no
    module or function."""
    kind = type(leaf)
    if issubclass(kind, (nn.Module, type)) or callable(leaf) or kind.__module__.startswith(("torch.", "transformers.")):
        return False
    return is_dataclass(leaf) or hasattr(leaf, "__dict__")
