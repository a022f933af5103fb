"""LossState: what a user's loss function and the model keep of a loss, which only the ranks of the last stage find
out."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fold3d.comms.world_group import WorldGroup
from fold3d.stage.users_state import is_state, namespace_of
from fold3d.trace.state import MOST_COPIED, is_users_object

logger = logging.getLogger(__name__)

Logged = tuple[int, float | None, dict[str, Any]]
"""The step and the epoch in which something was logged, and what."""
_Share = tuple[dict[str, Any], list[Logged]]


class LossState:
    """Attributes that change while the loss is computed, of a trainer, of the object that its `compute_loss_func` is,
    and of the model behind its blocks: counts and sums of metrics, for logs. No large tensors of the model's.

    Behind the model's call, a loss function goes on with the last chunk alone. What is changed there, and what it logs,
    the other stages take over before anybody may read it: numbers, text, tensors, arrays, containers of them, and
    objects of the user's classes. Containers and objects stay the same ones, which callbacks may hold.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._changed: set[str] = set()
        self._inside: dict[str, set[str]] = defaultdict(set)  # attributes of objects that are attributes
        self._logged: list[Logged] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Remembers what has changed in the body, in which losses are computed."""
        attributes = namespace_of(self._trainer)
        held = {name: _holder(value) for name, value in attributes.values.items()}
        inside = {name: namespace_of(value) for name, value in held.items() if is_users_object(value)}
        before, then = attributes.contents(), {name: one.contents() for name, one in inside.items()}
        yield
        self._changed.update(attributes.contents().changed(before))
        for name, one in inside.items():
            self._inside[name] |= one.contents().changed(then[name])

    def log(self, logs: dict[str, Any]) -> None:
        """The loss function has logged something."""
        self._logged.append((self._trainer.state.global_step, self._trainer.state.epoch, _on_host(logs)))

    def share(self, world: WorldGroup, model: Module, behind: Sequence[str], timeout: float) -> list[Logged]:
        """Takes over what has changed on the last stage of this rank's replica since the last call; returns what was
        logged there. Every rank calls.

        Args:
            behind: attributes of the model's modules, and of objects that these hold, that code behind the blocks
                changes, by their whole names.
        """
        topology, attributes = world.topology, vars(self._trainer)
        places = {_OF_MODEL + name: (_attributes_at(model, name.rpartition(".")[0]), name) for name in behind}
        told = self._told(attributes, places) if topology.has_loss else {}
        logged, self._logged = self._logged, []
        self._changed.clear()
        self._inside.clear()
        share = (topology.dp_rank, (told, logged) if topology.has_loss else None)
        found, logged = world.decide(share, _by_replica, timeout=timeout)[topology.dp_rank]
        for name, value in () if topology.has_loss else found.items():
            at, whole = places.get(name, (attributes, name))
            _take(at, whole.rpartition(".")[2], value)
        return logged

    def _told(self, attributes: dict[str, Any], places: Mapping[str, tuple[dict[str, Any], str]]) -> dict[str, Any]:
        """Returns what the other stages take over, of the trainer's attributes and of the model's at `places`."""
        mine = {name: _fields_of(attributes.get(name)) for name in self._changed}
        for name in [name for name, changed in self._inside.items() if changed and name not in mine]:
            of = _fields_of(attributes.get(name))
            if isinstance(of, _Fields):
                changed = self._inside[name]
                mine[name] = _Fields(None, {key: value for key, value in of.values.items() if key in changed})
        of_model = {name: at.get(whole.rpartition(".")[2]) for name, (at, whole) in places.items()}
        mine |= {name: _fields_of(value) for name, value in of_model.items() if _is_small(value)}
        mine = {name: value for name, value in mine.items() if isinstance(value, _Fields) or is_state(value)}
        mine = {name: _without_factories(_on_host(value)) for name, value in mine.items()}
        for name in [name for name, value in mine.items() if not _can_be_sent(value)]:
            logger.warning(
                "the computation of the loss has changed %s.%s, a %s, which pickle cannot take to the other processes: "
                "what they log of it is old. Keep it in numbers, tensors or containers of them",
                type(self._trainer).__name__,
                name,
                type(of_model.get(name, attributes.get(name))).__name__,
            )
            del mine[name]
        return mine


_OF_MODEL = "model."
"""In front of the names of the model's attributes."""


def _attributes_at(model: Module, path: str) -> dict[str, Any]:
    """Returns the attributes of a module, or of an object that one holds (`config`); none where it is not there."""
    owner: Any = model
    for name in path.split(".") if path else ():
        owner = getattr(owner, name, None)
    found = getattr(owner, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _is_small(value: Any) -> bool:
    return sum(one.numel() for one in tree_leaves(value) if isinstance(one, Tensor)) <= MOST_COPIED


def _holder(value: Any) -> Any:
    """Returns the object of which a value is a method; else the value."""
    return value.__self__ if isinstance(value, MethodType) else value


@dataclass(frozen=True, slots=True)
class _Fields:
    """Of an object of a class of the user's: what can be told, which its models and generators cannot."""

    kind: type | None
    """Its class, where it may not be there yet."""
    values: dict[str, Any]


def _fields_of(value: Any) -> Any:
    held = _holder(value)
    if not is_users_object(held) or not isinstance(getattr(held, "__dict__", None), dict):
        return value
    told = {name: one for name, one in vars(held).items() if is_state(one) and not isinstance(one, Module)}
    return _Fields(None if held is not value else type(held), told)


def _take(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Gives an attribute what another process has; containers and objects stay the same ones."""
    mine = _holder(attributes.get(name))
    if isinstance(value, _Fields):
        if not is_users_object(mine):
            if value.kind is None:
                return
            mine = attributes[name] = object.__new__(value.kind)
        for key, one in value.values.items():
            _take(vars(mine), key, one)
        return
    value = _with_factories(value, mine)
    if type(mine) is not type(value) or not isinstance(mine, (dict, set, list, deque)):
        attributes[name] = value
        return
    mine.clear()
    if isinstance(mine, (dict, set)):
        mine.update(value)
    else:
        mine.extend(value)


def _by_replica(shares: list[tuple[int, _Share | None]]) -> dict[int, _Share]:
    return {replica: share for replica, share in shares if share is not None}


def _on_host(value: Any) -> Any:
    if isinstance(value, _Fields):
        return _Fields(value.kind, {name: _on_host(one) for name, one in value.values.items()})
    found: Any = tree_map_only(Tensor, lambda tensor: torch.clone(tensor.detach()).cpu(), value)
    return found


@dataclass(frozen=True, slots=True)
class _Entries:
    """Of a defaultdict, whose factory may be a function that pickle refuses: the receiver has its own."""

    values: dict[Any, Any]
    factory: Callable[[], Any] | None


def _without_factories(value: Any) -> Any:
    if isinstance(value, _Fields):
        return _Fields(value.kind, {name: _without_factories(one) for name, one in value.values.items()})

    def entries(leaf: Any) -> Any:
        if not isinstance(leaf, defaultdict):
            return leaf
        values = {key: _without_factories(one) for key, one in leaf.items()}
        return _Entries(values, leaf.default_factory if _can_be_sent(leaf.default_factory) else None)

    return tree_map(entries, value, is_leaf=lambda leaf: isinstance(leaf, defaultdict))


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # of a function in a function
        return False
    return True


def _with_factories(value: Any, mine: Any) -> Any:
    """Returns what `_without_factories` was given; where a factory was not sent, with that of `mine`."""
    if isinstance(value, _Entries):
        factory = value.factory or (mine.default_factory if isinstance(mine, defaultdict) else None)
        made: defaultdict[Any, Any] = defaultdict(factory)
        for key, one in value.values.items():
            known = mine.get(key) if isinstance(mine, dict) else None
            made[key] = _with_factories(one, factory() if known is None and factory is not None else known)
        return made
    if type(value) is dict:
        known = mine if isinstance(mine, dict) else {}
        return {key: _with_factories(one, known.get(key)) for key, one in value.items()}
    return tree_map(lambda leaf: _with_factories(leaf, None) if isinstance(leaf, _Entries) else leaf, value)
