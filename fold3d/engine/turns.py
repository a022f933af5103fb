"""Turns: several engines may use one model, one after the other."""

from __future__ import annotations

from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch.nn import Module


class TakesTurns(Protocol):
    """Uses a model that others may use before and after it."""

    def rest(self) -> None:
        """Another one is about to use the model."""


_users: WeakKeyDictionary[Module, ReferenceType[TakesTurns]] = WeakKeyDictionary()


def take_turn(user: TakesTurns, model: Module) -> None:
    """Has whoever else used `model` last rest, if it is still there."""
    found = _users.get(model)
    last = None if found is None else found()
    if last is user:
        return
    if last is not None:
        last.rest()
    _users[model] = ref(user)
