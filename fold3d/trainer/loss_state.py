"""LossState: what a user's compute_loss keeps in the trainer, which only the ranks of the last stage find out."""

from __future__ import annotations

import contextlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from fold3d.comms.world_group import WorldGroup

_PLAIN = (bool, int, float, str, bytes, type(None), Tensor)


class LossState:
    """Attributes of a trainer that change while the loss is computed: counts and sums of metrics, for its logs.

    Behind the model's call, `compute_loss` goes on with the last chunk alone. What it changes there, the trainers of
    the other stages take over before anybody may read it. Numbers, text, tensors and containers of them are looked at.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._changed: set[str] = set()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Remembers what has changed in the body, in which losses are computed."""
        before = {name: _version(value) for name, value in vars(self._trainer).items()}
        yield
        for name, value in vars(self._trainer).items():
            now = _version(value)
            if now is not None and before.get(name) != now:
                self._changed.add(name)

    def share(self, world: WorldGroup, timeout: float) -> dict[str, Any]:
        """Returns what this rank is to take over: attributes that changed on its replica's last stage since the last
        call; every rank calls."""
        attributes = vars(self._trainer)
        mine = {name: _without_factories(_on_host(attributes[name])) for name in self._changed if name in attributes}
        self._changed.clear()
        topology = world.topology
        found = world.decide((topology.dp_rank, mine if topology.is_last_stage else None), _by_replica, timeout=timeout)
        if topology.is_last_stage:
            return {}
        return {name: _with_factories(value, attributes.get(name)) for name, value in found[topology.dp_rank].items()}


def _by_replica(shares: list[tuple[int, dict[str, Any] | None]]) -> dict[int, dict[str, Any]]:
    return {replica: changed for replica, changed in shares if changed is not None}


def _version(value: Any) -> Any:
    """Returns what differs once `value` has changed; None for what is not looked at."""
    leaves, structure = tree_flatten(value)
    if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        return None
    return structure, [(id(leaf), leaf._version) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _on_host(value: Any) -> Any:
    found: Any = tree_map_only(Tensor, lambda tensor: torch.clone(tensor.detach()).cpu(), value)
    return found


@dataclass(frozen=True, slots=True)
class _Entries:
    """Of a defaultdict, whose factory may be a function that cannot travel: the receiver has its own."""

    values: dict[Any, Any]
    factory: Callable[[], Any] | None


def _without_factories(value: Any) -> Any:
    def entries(leaf: Any) -> Any:
        if not isinstance(leaf, defaultdict):
            return leaf
        values = {key: _without_factories(one) for key, one in leaf.items()}
        return _Entries(values, leaf.default_factory if _travels(leaf.default_factory) else None)

    return tree_map(entries, value, is_leaf=lambda leaf: isinstance(leaf, defaultdict))


def _travels(factory: Any) -> bool:
    try:
        pickle.dumps(factory)
    except Exception:  # of a function in a function
        return False
    return True


def _with_factories(value: Any, mine: Any) -> Any:
    """Returns what `_without_factories` was given; where a factory did not travel, with that of `mine`."""
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
