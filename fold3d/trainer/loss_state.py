"""LossState: what a user's compute_loss keeps in the trainer, which only the ranks of the last stage find out."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from fold3d.comms.world_group import WorldGroup
from fold3d.stage.users_state import is_state, namespace_of
from fold3d.trace.state import is_users_object

logger = logging.getLogger(__name__)

Logged = tuple[int, float | None, dict[str, Any]]
"""The step and the epoch in which something was logged, and what."""
_Share = tuple[dict[str, Any], list[Logged]]


class LossState:
    """Attributes of a trainer that change while the loss is computed: counts and sums of metrics, for its logs.

    Behind the model's call, `compute_loss` goes on with the last chunk alone. What it changes there, and what it logs,
    the trainers of the other stages take over before anybody may read it: numbers, text, tensors, arrays, containers of
    them, and objects of the user's classes.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._changed: set[str] = set()
        self._logged: list[Logged] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Remembers what has changed in the body, in which losses are computed."""
        attributes = namespace_of(self._trainer)
        inside = {name: namespace_of(value) for name, value in attributes.values.items() if is_users_object(value)}
        before, then = attributes.contents(), {name: one.contents() for name, one in inside.items()}
        yield
        self._changed.update(attributes.contents().changed(before))
        self._changed.update(name for name, one in inside.items() if one.contents().changed(then[name]))

    def log(self, logs: dict[str, Any]) -> None:
        """The loss function has logged something."""
        self._logged.append((self._trainer.state.global_step, self._trainer.state.epoch, _on_host(logs)))

    def share(self, world: WorldGroup, timeout: float) -> tuple[dict[str, Any], list[Logged]]:
        """Returns what this rank is to take over: attributes that changed on its replica's last stage since the last
        call, and what was logged there; every rank calls."""
        attributes = vars(self._trainer)
        mine = {name: attributes[name] for name in self._changed if is_state(attributes.get(name))}
        mine = {name: _without_factories(_on_host(value)) for name, value in mine.items()}
        for name in [name for name, value in mine.items() if not _can_be_sent(value)]:
            logger.warning(
                "compute_loss has changed %s.%s, a %s, which pickle cannot take to the other processes: what they log "
                "of it is old. Keep it in numbers, tensors or containers of them",
                type(self._trainer).__name__,
                name,
                type(mine.pop(name)).__name__,
            )
        logged, self._logged = self._logged, []
        self._changed.clear()
        topology = world.topology
        share = (topology.dp_rank, (mine, logged) if topology.has_loss else None)
        found, logged = world.decide(share, _by_replica, timeout=timeout)[topology.dp_rank]
        if topology.has_loss:
            found = {}
        return {name: _with_factories(value, attributes.get(name)) for name, value in found.items()}, logged


def _by_replica(shares: list[tuple[int, _Share | None]]) -> dict[int, _Share]:
    return {replica: share for replica, share in shares if share is not None}


def _on_host(value: Any) -> Any:
    found: Any = tree_map_only(Tensor, lambda tensor: torch.clone(tensor.detach()).cpu(), value)
    return found


@dataclass(frozen=True, slots=True)
class _Entries:
    """Of a defaultdict, whose factory may be a function that pickle refuses: the receiver has its own."""

    values: dict[Any, Any]
    factory: Callable[[], Any] | None


def _without_factories(value: Any) -> Any:
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
