"""What a model's modules keep between forwards: buffers and plain attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

ABSENT = object()
"""In the place of an attribute that is not there."""
_OTHER = object()
"""In the place of a value that is not looked at."""
_SIMPLE = frozenset((bool, int, float, complex, str, bytes, type(None)))
_COLLECTIONS = frozenset((list, tuple, set, frozenset, deque))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ModelValues:
    """Buffers and plain attributes of a model at the time this is made, for a run that shall leave no traces."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._attributes = PlainAttributes(model, dict(enumerate(self._modules)))
        self._buffers = [(module, name, one) for module in self._modules for name, one in module._buffers.items()]
        tensors = [one for _, _, one in self._buffers]
        tensors += [
            one for held in self._attributes.values.values() for one in held.values() if isinstance(one, Tensor)
        ]
        self._values = [(one, one.detach().clone()) for one in tensors if one is not None and not one.is_meta]

    def restore(self) -> tuple[bool, list[str]]:
        """Makes all what they were; returns whether a tensor has changed meanwhile, and names of other attributes that
        have."""
        changed = [(one, value) for one, value in self._values if not torch.equal(one, value)]
        moved = [place for place in self._buffers if place[0]._buffers.get(place[1]) is not place[2]]
        for one, value in changed:
            one.data.copy_(value)
        for module, name, buffer in moved:
            module._buffers[name] = buffer
        attributes = list(self._attributes.changed())
        for number, name, value, _ in attributes:
            put(vars(self._modules[number]), name, value)
        names = dict.fromkeys(f"{type(self._modules[number]).__name__}.{name}" for number, name, _, _ in attributes)
        return bool(changed or moved), list(names)


class PlainAttributes:
    """Attributes of some modules at the time this is made: numbers, text, None, tensors without a gradient, and lists,
    dictionaries, sets and tuples of them."""

    def __init__(self, model: nn.Module, modules: Mapping[int, nn.Module]) -> None:
        self._model, self._modules = model, modules
        self._next_hook = RemovableHandle.next_id
        self.values = {number: _attributes_of(module) for number, module in modules.items()}

    def changed(self) -> Iterator[tuple[int, str, Any, Any]]:
        """Yields number of the module, name, value then (or ABSENT) and now of those that are others by now.

        Without the flag that says that hooks have been registered, which must stay as they do: what was absent, None
        or False where a module has a new hook. transformers' models register them when hidden states are first asked
        for, and would do so again.
        """
        has_hook: bool | None = None
        for number, known in self.values.items():
            held = vars(self._modules[number])
            for name in known.keys() | (held.keys() - _OF_EVERY_MODULE):
                one, other = known.get(name, ABSENT), held.get(name, ABSENT)
                if one is other or one is _OTHER or same(one, other) or (now := plain(other)) is _OTHER:
                    continue
                if one is ABSENT or one is None or one is False:
                    has_hook = self._has_new_hook() if has_hook is None else has_hook
                    if has_hook:
                        continue
                yield number, name, one, now

    def _has_new_hook(self) -> bool:
        return RemovableHandle.next_id > self._next_hook and any(
            key >= self._next_hook
            for module in self._model.modules()
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
            for key in hooks
        )


def put(holder: dict[str, Any], name: str, value: Any) -> None:
    """Sets a value of modules' `vars()` or buffers, or takes it away where it is ABSENT."""
    if value is ABSENT:
        holder.pop(name, None)
    else:
        holder[name] = value


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {
        name: value if type(value) in _SIMPLE else plain(value)  # written out: there are many of them
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
    }


def plain(value: Any) -> Any:
    """Returns `value`, in containers of its own; _OTHER for what is not looked at."""
    kind = type(value)
    if kind in _SIMPLE or value is ABSENT or (isinstance(value, Tensor) and not value.requires_grad):
        return value
    if kind is dict or kind in _COLLECTIONS:
        values = [plain(one) for one in (value.values() if kind is dict else value)]
        if not any(one is _OTHER for one in values):
            return dict(zip(value, values, strict=True)) if kind is dict else kind(values)
    return _OTHER


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are the same; a tensor is only itself."""
    kind = type(one)
    if one is other or kind is not type(other) or isinstance(one, Tensor):
        return one is other
    if kind is dict:
        return list(one) == list(other) and same(list(one.values()), list(other.values()))
    if kind in (list, tuple, deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
