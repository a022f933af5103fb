"""Conversions: parameters that a folder has in other tensors than the model, such as the experts of a block one by one.

Which they are and what makes parameters of them is transformers' matter (its `WeightConverter`s); here they run one at
a time, so that no more than one parameter, and what it is made of, is in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fold3d.trace.batches import is_transformers_model
from fold3d.weights.part_marks import state_of


@dataclass(slots=True)
class Conversion:
    """Tensors of a folder that together make one or several parameters."""

    name: str
    """The first of these in the model."""
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(name in the folder, transformers' pattern for it)."""

    def may_make(self, names: Iterable[str]) -> bool:
        """Whether one of the parameters `names` may come of it."""
        first, *others = self.converter.target_patterns
        if any("\\" in pattern for pattern in (first, *others)):  # told only by converting
            return True
        made = {self.name, *(self.name.replace(first, other) for other in others)}
        return not made.isdisjoint(names)

    def run(self, model: Any, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields name and whole value of each parameter.

        Args:
            read: returns a tensor of the folder.
        """
        dtype = state_of(model)[self.name].dtype
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.name, key, pattern, _Reading(read, key, dtype))
        made = converter.convert(self.name, model=model, config=model.config)
        for name in list(made):
            value = made.pop(name)
            yield name, value[0] if isinstance(value, list) else value


class _Reading:
    """Reads a tensor when it is called."""

    def __init__(self, read: Callable[[str], Tensor], key: str, dtype: Any) -> None:
        self._read, self._key, self._dtype = read, key, dtype

    def __call__(self) -> Tensor:
        return self._read(self._key).to(self._dtype)


def conversions(model: nn.Module, keys: Iterable[str]) -> list[Conversion]:
    """Returns what transformers' `from_pretrained` would convert of the tensors `keys` of a folder for this model."""
    if not is_transformers_model(model):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    entries = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    if not converters:
        return []
    renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = state_of(model), getattr(model, "base_model_prefix", None)
    found: dict[str, Conversion] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if pattern is not None and name in state:
            found.setdefault(name, Conversion(name, of_pattern[pattern])).sources.append((key, pattern))
    return list(found.values())
