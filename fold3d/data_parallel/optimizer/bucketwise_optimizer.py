"""BucketwiseOptimizer: the user's optimizer, stepped one bucket at a time and later than it was asked to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d.comms.tree_group import TreeGroup
from fold3d.data_parallel.bucket import Bucket, Piece, check_dropped, laid_out
from fold3d.data_parallel.gradients import Factor
from fold3d.data_parallel.optimizer import state
from fold3d.data_parallel.optimizer.bucket_optimizer import BucketOptimizer, Settings
from fold3d.data_parallel.optimizer.host_copies import host_copies
from fold3d.errors import ConfigError


class BucketwiseOptimizer:
    """The user's optimizer over some buckets: whole buckets, or this replica's shard ("zero1").

    Of shards each replica keeps its part of the optimizer's state; `collect_state` puts it together.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        sharded: Sequence[bool],
        data: TreeGroup,
        *,
        on_host: bool = False,
        kernel: bool = False,
        feeds_back: bool = False,
        looked: Callable[[], None] = lambda: None,
    ):
        """Moves parameters of sharded buckets into one flat tensor each.

        Args:
            buckets: in the order of their numbers.
            sharded: per bucket, whether this replica steps its shard only.
            data: the replicas of this rank's stage.
            on_host: steps are taken in host memory, where the state lies.
            kernel, feeds_back: as in `BucketOptimizer`.
            looked: as in `WatchedState`.
        Raises: ConfigError when the host lacks memory.
        """
        self._optimizer, self._buckets, self._data, self._looked = optimizer, buckets, data, looked
        self._groups = groups_of(optimizer)
        self._is_sharded = list(sharded)
        self._sharded = [bucket for bucket, is_sharded in zip(buckets, sharded, strict=True) if is_sharded]
        # Buckets that are to be stepped when they are opened, and in which autocast.
        self._pending: dict[int, tuple[Settings, AbstractContextManager[Any]]] = {}
        self._collected = False  # the optimizer's state is whole
        self._watched: state.WatchedState | None = None
        tensors: list[list[tuple[Piece, Tensor]]] = []
        for bucket, is_sharded in zip(buckets, sharded, strict=True):
            if bucket.versions:  # the newest is stepped, whatever the parameters have
                pieces = bucket.pieces if is_sharded else bucket.all_pieces
                tensors.append([(piece, _nothing_like(piece.parameter)) for piece in pieces])
            elif is_sharded:
                bucket.flatten_parameters()
                assert bucket.weights is not None
                tensors.append([(piece, piece.of(bucket.weights)) for piece in bucket.pieces])
            else:
                tensors.append([(piece, piece.parameter) for piece in bucket.all_pieces])
            self._point(bucket, tensors[-1])
        self.parts = parts_of(optimizer, tensors, sharded, on_host=on_host, kernel=kernel, feeds_back=feeds_back)
        self._next = dict(pairwise(bucket.number for bucket in self._sharded))
        self._on_host = on_host
        self.split_state()

    def point(self, bucket: Bucket) -> None:
        """The bucket's newest weights are in another of its `versions` from now on: that one is stepped."""
        self._point(bucket, self.parts[bucket.number].tensors)

    def _point(self, bucket: Bucket, tensors: Sequence[tuple[Piece, Tensor]]) -> None:
        if not bucket.versions:
            return
        assert bucket.weights is not None
        for piece, tensor in tensors:
            part = piece.of(bucket.weights)
            tensor.data = part if self._is_sharded[bucket.number] else laid_out(part, piece.parameter)

    def check_dropped(self, why: str) -> None:
        """Raises ConfigError where `.grad` shows gradients that it has not taken, and says `why` they would be lost."""
        check_dropped(self._optimizer, why)

    def settings(self, coefficient: Factor) -> Settings:
        """Returns the optimizer's settings of now, for gradients that are scaled by `coefficient`."""
        return Settings.of(self._optimizer, coefficient)

    def step_shard(self, bucket: Bucket, settings: Settings) -> None:
        """Steps this replica's shard of a bucket's weights. Where it does so on the host, the next one sets out for it:
        sharded buckets are stepped in order, and all their gradients are here."""
        following = self._next.get(bucket.number) if self._on_host else None
        ahead = None if following is None else partial(self._prepare, self._buckets[following], settings)
        self.parts[bucket.number].step(_shard_gradients(bucket), settings, ahead)

    def _prepare(self, bucket: Bucket, settings: Settings) -> None:
        self.parts[bucket.number].prepare(_shard_gradients(bucket), settings)

    def postpone(self, bucket: Bucket, settings: Settings) -> None:
        """`step_postponed` shall step the whole bucket, in the autocast of now: forwards have theirs."""
        self._pending[bucket.number] = settings, _autocast_of_now(bucket.gradients.device.type)

    def is_postponed(self, bucket: Bucket) -> bool:
        """Whether the bucket is still to be stepped."""
        return bucket.number in self._pending

    def step_postponed(self, bucket: Bucket) -> bool:
        """Steps a bucket whose gradients are here, if it is still to be stepped; returns whether it was."""
        pending = self._pending.pop(bucket.number, None)
        if pending is None:
            return False
        settings, autocast = pending
        gradients = {k: view for k, view in enumerate(bucket.views) if bucket.used[k]}
        now = self._optimizer.state
        with torch.inference_mode(False), autocast:
            try:  # who has put another one there meanwhile, to forget momentum, means the steps from now on
                self._optimizer.state = now if self._watched is None else self._watched
                self.parts[bucket.number].step(gradients, settings)
            finally:
                self._optimizer.state = now
        return True

    def check_unchanged(self) -> None:
        """Raises ConfigError when parameters or groups are not what the optimizer was attached with."""
        for bucket in self._buckets:
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                if bucket.weights is not None and not bucket.holds(parameter):
                    raise ConfigError(
                        f"{name} got other memory after the engine was built (.data was assigned, or .to() called); "
                        "change weights in place, or make a new Engine"
                    )
        if self._sharded and not isinstance(self._optimizer.state, state.WatchedState):
            raise ConfigError(
                "the optimizer's `state` was replaced, and each replica keeps its part of it elsewhere; clear or "
                "change it inside `with engine.whole_optimizer_state():`, on all ranks"
            )
        self._watch_state()
        check_groups(self._optimizer, self._groups)

    def collect_state(self) -> None:
        """Fills the optimizer's state with what the replicas hold in parts; all replicas call. See `split_state`."""
        with self.opened_state():
            for bucket in self._sharded:
                part = self.parts[bucket.number]
                with part.memory():
                    self._optimizer.state.update(state.gather(bucket, part, self._data))
        self._collected = True

    @contextlib.contextmanager
    def opened_state(self) -> Iterator[None]:
        """The optimizer's own state, which is without what the replicas hold in parts, may be read and changed."""
        before, self._collected = self._collected, True
        try:
            yield
        finally:
            self._collected = before

    @property
    def names(self) -> frozenset[str]:
        """Of the parameters whose state the replicas hold in parts."""
        return frozenset(name for bucket in self._sharded for name in bucket.names)

    @contextlib.contextmanager
    def held_state(self) -> Iterator[list[tuple[Piece, dict[str, Any]]]]:
        """Yields this replica's part of the state of these parameters, as it is, by piece. In the body the optimizer's
        own state, which is without them, may be read."""
        with self.opened_state():
            parts = [self.parts[bucket.number] for bucket in self._sharded]
            yield [
                (piece, part.twin.state[one]) for part in parts for piece, one in part.tensors if one in part.twin.state
            ]

    def load_held(self, read: Callable[[Piece], dict[str, Any] | None]) -> None:
        """Puts what `read` returns of a piece in the place of this replica's part of the state; None: the piece has
        none. What lies whole in the optimizer has been loaded."""
        for bucket, is_sharded in zip(self._buckets, self._is_sharded, strict=True):
            part = self.parts[bucket.number]
            if is_sharded:
                part.load(read)
            elif self._on_host:
                with self.opened_state():
                    part.own_state()

    def _state_is_whole(self) -> bool:
        return self._collected or not any(self.parts[bucket.number].twin.state for bucket in self._sharded)

    def check_state_is_whole(self) -> None:
        """The optimizer's state is about to be read. Raises ConfigError when this replica has only a part of it."""
        if isinstance(self._optimizer.state, state.WatchedState):
            self._optimizer.state.check()

    def split_state(self) -> None:
        """Keeps this rank's part of a state that is whole in the optimizer: that `collect_state` has put together,
        with what was changed of it, or one that was loaded."""
        with self.opened_state():
            for bucket, is_sharded in zip(self._buckets, self._is_sharded, strict=True):
                part = self.parts[bucket.number]
                if is_sharded:
                    with part.memory():
                        state.scatter(bucket, part, self._optimizer)
                elif self._on_host:
                    part.own_state()
        self._collected = False
        self._watch_state()

    def _watch_state(self) -> None:
        if self._optimizer.state is self._watched:
            return
        apart = [parameter for bucket in self._sharded for parameter in bucket.parameters]
        self._watched = state.WatchedState(self._optimizer.state, apart, self._state_is_whole, self._looked)
        self._optimizer.state = self._watched


def _autocast_of_now(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))


def parts_of(
    optimizer: Optimizer,
    tensors: Sequence[Sequence[tuple[Piece, Tensor]]],
    sharded: Sequence[bool],
    *,
    on_host: bool,
    kernel: bool = False,
    feeds_back: bool = False,
) -> list[BucketOptimizer]:
    """Returns what steps each entry of `tensors`, on the host if `on_host`: for the rest see `BucketOptimizer`.

    Raises: ConfigError when the host lacks memory.
    """
    if not on_host:
        pairs = zip(tensors, sharded, strict=True)
        make = partial(BucketOptimizer, optimizer, kernel=kernel, feeds_back=feeds_back)
        return [make(one, sharded=part) for one, part in pairs]
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    held = [[(piece, tensor) for piece, tensor in one if id(piece.parameter) in stepped] for one in tensors]
    # Those that follow each other take turns, so that one sets out while the other is stepped.
    turns = [sum(sharded[:k]) % 2 if part else k % 2 for k, part in enumerate(sharded)]
    return [
        BucketOptimizer(optimizer, one, sharded=part, copies=copies, kernel=kernel, feeds_back=feeds_back)
        for one, part, copies in zip(held, sharded, host_copies(held, turns), strict=True)
    ]


def groups_of(optimizer: Optimizer) -> list[set[int]]:
    """Returns which parameters each group of the optimizer has, by identity."""
    return [set(map(id, group["params"])) for group in optimizer.param_groups]


def check_groups(optimizer: Optimizer, known: Sequence[set[int]]) -> None:
    """Raises ConfigError when the optimizer has other groups than `known`, or other parameters in them."""
    count = len(optimizer.param_groups)
    if count != len(known):
        raise ConfigError(
            f"a parameter group was added after the optimizer was attached: it has {count}, and had {len(known)}; make "
            "a new Engine"
        )
    if changed := [
        number for number, (now, one) in enumerate(zip(groups_of(optimizer), known, strict=True)) if now != one
    ]:
        raise ConfigError(
            f"parameter group {changed[0]} has other parameters than when the optimizer was attached, and each is "
            "stepped with the settings of the group that it was in then: set requires_grad to freeze some, give those "
            "that shall have settings of their own a group from the beginning, or make a new Engine"
        )


def _nothing_like(parameter: Tensor) -> Tensor:
    """Returns a tensor that is to get memory of the parameter's kind."""
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _shard_gradients(bucket: Bucket) -> dict[int, Tensor]:
    return {p.index: p.of(bucket.gradients) for p in bucket.pieces if bucket.used[p.index]}
