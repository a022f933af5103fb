"""The optimizer's state when every replica has a part of it: put together for a checkpoint, taken apart after one."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d.comms.tree_group import TreeGroup
from fold3d.data_parallel.bucket import Bucket, Piece, flattened, laid_out
from fold3d.data_parallel.optimizer.bucket_optimizer import BucketOptimizer
from fold3d.data_parallel.optimizer.host_memory import unwrapped
from fold3d.errors import ConfigError

State = dict[Tensor, dict[str, Any]]
"""Parameter -> its optimizer state."""


def _checked(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: WatchedState, *args: Any, **named: Any) -> Any:
        self.check(*args)
        return method(self, *args, **named)

    return call


class WatchedState(defaultdict[Tensor, dict[str, Any]]):
    """What `Optimizer.state` is where parameters are stepped bucket by bucket: whoever looks into it finds what the
    last step has left. Where replicas have parts of some parameters' state, these are not in it: whoever looks for
    them, or at all there is, would find nothing, and what is written of them would be lost, so that is refused."""

    def __init__(
        self, state: State, apart: Iterable[Tensor], is_whole: Callable[[], bool], looked: Callable[[], None]
    ) -> None:
        """Args:
        apart: parameters of whose state the replicas have parts.
        is_whole: whether their state is in it at the moment, or there is none yet.
        looked: called before somebody looks, or writes; completes the last step.
        """
        super().__init__(dict)
        self._apart, self._is_whole, self._looked = {id(parameter) for parameter in apart}, is_whole, looked
        dict.update(self, dict.items(state))  # perhaps that of an engine before, whose parts went with it

    def check(self, *keys: Any) -> None:
        """Raises ConfigError unless it is whole, or `keys` begins with a parameter whose state is here."""
        self._looked()
        is_here = not self._apart or (bool(keys) and isinstance(keys[0], Tensor) and id(keys[0]) not in self._apart)
        if not is_here and not self._is_whole():
            raise ConfigError(
                "each replica keeps a part of the optimizer's state; take engine.state_dict(), or read or change it "
                "inside `with engine.whole_optimizer_state():`, on all ranks"
            )

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())  # a copy of the optimizer is without replicas

    def copy(self) -> Any:
        """Returns a plain one."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    __getitem__, __setitem__, __delitem__ = _checked("__getitem__"), _checked("__setitem__"), _checked("__delitem__")
    __contains__, __iter__, __len__ = _checked("__contains__"), _checked("__iter__"), _checked("__len__")
    get, pop, setdefault, update = _checked("get"), _checked("pop"), _checked("setdefault"), _checked("update")
    keys, values, items, clear = _checked("keys"), _checked("values"), _checked("items"), _checked("clear")


def gather(bucket: Bucket, part: BucketOptimizer, data: TreeGroup) -> State:
    """Returns the whole state of a bucket's parameters, numbers such as step counters on the CPU and tensors on their
    device; all replicas of the stage call."""
    mine = {piece.index: part.twin.state[tensor] for piece, tensor in part.tensors if tensor in part.twin.state}
    flat: dict[str, Tensor] = {}
    plain: dict[int, dict[str, Any]] = {}
    width = bucket.shard.stop - bucket.shard.start
    for piece, _ in part.tensors:
        for key, value in mine.get(piece.index, {}).items():
            if is_split(value, piece):
                whole = flat.setdefault(key, torch.zeros(width, dtype=value.dtype, device=value.device))
                whole[piece.start - bucket.shard.start : piece.stop - bucket.shard.start] = value
            else:
                # On the CPU: what is pickled on a device wants the same device where it is unpickled.
                plain.setdefault(piece.index, {})[key] = value.cpu() if isinstance(value, Tensor) else value
    kinds = {key: value.dtype for key, value in flat.items()}
    told = data.share(data.gather((kinds, plain, {index: list(state) for index, state in mine.items()})))
    result: State = {}
    for _, values, keys in told:
        for index in keys:
            result.setdefault(bucket.parameters[index], {}).update(values.get(index, {}))
    for key, dtype in sorted({item for kinds, _, _ in told for item in kinds.items()}, key=lambda item: item[0]):
        own = flat.get(key, torch.zeros(width, dtype=dtype)).to(bucket.gradients.device)
        whole = part.own(torch.cat(data.all_gather(own)))
        owners = {
            index
            for _, values, keys in told
            for index, names in keys.items()
            if key in names and key not in values.get(index, {})
        }
        for piece in bucket.all_pieces:
            if piece.index in owners:
                view = laid_out(whole[piece.start : piece.stop], piece.parameter)
                result[piece.parameter][key] = view.clone()
    return result


def scatter(bucket: Bucket, part: BucketOptimizer, optimizer: Optimizer) -> None:
    """Takes this rank's part of the optimizer's state of a bucket's parameters and drops the rest."""
    part.twin.state.clear()
    for piece, tensor in part.tensors:
        state = optimizer.state.get(piece.parameter)
        if state is not None:
            part.twin.state[tensor] = {key: part.own(_slice(unwrapped(value), piece)) for key, value in state.items()}
    drop(bucket, optimizer)


def drop(bucket: Bucket, optimizer: Optimizer) -> None:
    """Forgets the whole state of a bucket's parameters."""
    for parameter in bucket.parameters:
        optimizer.state.pop(parameter, None)


def is_split(value: Any, piece: Piece) -> bool:
    """Whether a state has an element for each of the piece's; else it is a number such as a step counter."""
    return isinstance(value, Tensor) and value.ndim > 0 and tuple(value.shape) == (piece.stop - piece.start,)


def _slice(value: Any, piece: Piece) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 0 or value.shape != piece.parameter.shape:
        return value.clone()
    flat = flattened(value, piece.parameter)
    return flat[piece.offset : piece.offset + piece.stop - piece.start].clone()
