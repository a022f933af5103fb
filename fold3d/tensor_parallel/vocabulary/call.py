"""Call: a function of torch that is called with tensors held in parts; what rules for such functions share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel


class NeedsWhole(Exception):
    """The function cannot be computed on parts: gather the tensors and call it on the whole."""


@dataclass(frozen=True, slots=True)
class Call:
    """What __torch_function__ is told."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The function's name, for logs; of a property its own."""
        name: str = getattr(self.function, "__name__", str(self.function))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(self.function, "__self__", None), "__name__", name)
        return name

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors among the arguments."""
        return (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))

    def subject(self) -> ColumnParallel:
        """Returns the first argument. Raises: NeedsWhole when it is none of ours, or others among the arguments are."""
        found: list[ColumnParallel] = [one for one in self.tensors() if isinstance(one, ColumnParallel)]
        if len(found) != 1 or not self.args or self.args[0] is not found[0] or "out" in self.kwargs:
            raise NeedsWhole
        subject: ColumnParallel = found[0]
        return subject

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Returns an argument that may be given by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


Rule = Callable[[Call], Any]
"""Returns what the function returns. Raises: NeedsWhole."""


def words(text: str) -> list[str]:
    """Returns the words of a list that is written as one text."""
    return text.split()


def functions(names: str) -> Iterator[Callable[..., Any]]:
    """Yields torch's functions and methods of these names, which stand in one text."""
    for name in words(names):
        for home in (torch, Tensor, functional):
            found = getattr(home, name, None)
            if callable(found):
                yield found


def over_vocabulary(call: Call) -> tuple[ColumnParallel, int]:
    """Returns the tensor and its vocabulary's dimension, of a function along this dimension.

    Raises: NeedsWhole when it is along another one.
    """
    logits = call.subject()
    dim = call.argument(1, "dim", call.kwargs.get("axis"))
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(dim, int) or dim not in (
        logits.vocabulary_dim,
        logits.vocabulary_dim - len(logits.shape_of_whole()),
    ):
        raise NeedsWhole
    return logits, logits.vocabulary_dim
