"""The state of a whole model, gathered from its stages and shards and taken apart again, by original names."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fold3d.comms.groups import Groups
from fold3d.comms.world_group import WorldGroup
from fold3d.config import ParallelConfig
from fold3d.data_parallel.bucket import Piece
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.data_parallel.late.late_gradients import LateGradients
from fold3d.data_parallel.late.versioned import Versioned
from fold3d.data_parallel.late.weight_versions import WeightVersions, parameter_of
from fold3d.data_parallel.optimizer.bucket_optimizer import Settings
from fold3d.data_parallel.optimizer.bucketwise_optimizer import BucketwiseOptimizer
from fold3d.data_parallel.optimizer.host_memory import host_memory
from fold3d.data_parallel.optimizer.parameter_state import assembled, like_parameter, part_of_state, shard_of_state
from fold3d.engine.built import BuiltRank
from fold3d.errors import CheckpointError
from fold3d.faults.supervisor import Supervisor
from fold3d.sharding.shard import Shard
from fold3d.stage.rank_model import RankModel
from fold3d.trace.compound import is_compound
from fold3d.weights.part_marks import state_of

Tensors = dict[str, torch.Tensor]
Shards = dict[Any, Shard]
"""How the values are spread that are, by key."""


def gather_model(cut: RankModel, world: WorldGroup) -> Tensors:
    """Returns every parameter but quantised ones, and every persistent buffer of replica 0's, on the CPU; all ranks of
    the job call."""
    plain = [name for name in cut.primary() if not is_compound(cut.parameters[name])]
    mine: dict[Any, Any] = {name: cut.parameters[name].detach().cpu() for name in plain}
    spread: Shards = dict(cut.parts.spread(mine))
    buffers = {name: tensor.detach().cpu() for name, tensor in own_buffers(cut).items()}
    if buffers:
        mine.update(world.data.share(buffers))
    merged = _merge(mine, spread, cut, world)
    order = dict.fromkeys((*(name for name in state_of(cut.model) if name in merged), *merged))  # one may be None here
    return {name: merged[name].clone() for name in order}


def gather_optimizer(cut: RankModel, optimizer: Optimizer | None, world: WorldGroup) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's state of every parameter by name, on the CPU; all ranks of a replica call.

    Raises: CheckpointError for a state that cannot be put together, see `shard_of_state`.
    """
    mine: dict[Any, Any] = {}
    spread: Shards = {}
    if optimizer is not None:
        primary = cut.primary()
        for name, parameter in cut.parameters.items():
            if name in primary and parameter in optimizer.state:
                mine[name, None] = None  # of an optimizer that has a state, but nothing in it
                for key, value in optimizer.state[parameter].items():
                    mine[name, key] = _to_cpu(value)
                    shard = shard_of_state(name, key, value, parameter.shape, cut.parts)
                    if shard is not None:
                        spread[name, key] = shard
    merged: dict[str, dict[str, Any]] = {}
    for (name, key), value in _merge(mine, spread, cut, world).items():
        values = merged.setdefault(name, {})
        if key is not None:
            values[key] = value
    return merged


def own_buffers(cut: RankModel) -> Tensors:
    """Returns the persistent buffers this stage is responsible for: those of its layers, the rest on stage 0."""
    return _buffers(cut, {cut.stage})


def _buffers(cut: RankModel, stages: Collection[int]) -> Tensors:
    """Returns the persistent buffers that are here, and for which these stages are responsible."""
    stage_of = cut.placement.stage_of_module
    names = set(state_of(cut.model)) - {n for n, _ in cut.model.named_parameters(remove_duplicate=False)}
    return {
        name: buffer
        for name, buffer in cut.model.named_buffers()
        if name in names and stage_of(name) in stages and not buffer.is_meta
    }


def load(cut: RankModel, optimizer: Optimizer | None, full: Mapping[str, Any], *, on_host: bool = False) -> None:
    """Copies this rank's share of `full` into the model and the optimizer.

    Args:
        on_host: the optimizer's state lies in host memory.
    Raises: CheckpointError, before anything has changed, when a tensor is missing or has another shape, or when a part
        of the optimizer's state cannot be had.
    """
    weights: Mapping[str, torch.Tensor] = full["model"]
    parts = cut.parts
    read = _buffers(cut, {0, cut.stage})  # code around the blocks may read those that stage 0 saves on any stage
    targets = {**{n: p.data for n, p in cut.parameters.items() if not is_compound(p)}, **read}
    for name, target in targets.items():
        found, whole = weights.get(name), parts.whole_shape(name, target.shape)
        if found is None or tuple(found.shape) != whole:
            raise CheckpointError(
                f"the state has {'no' if found is None else f'shape {list(found.shape)} for'} {name!r}, the model has "
                f"shape {list(whole)}; it belongs to another model"
            )
    states = {} if optimizer is None else _states(cut, optimizer, full["optimizer"], on_host)
    for name, target in targets.items():
        shard = parts.shard_of(name)
        if shard is None:
            target.copy_(weights[name])
        else:
            shard.copy_to_part(target, weights[name], parts.rank)
    if optimizer is None:
        return
    for name, parameter in cut.parameters.items():
        optimizer.state.pop(parameter, None)  # what came after the state was saved does not count
        if name in states:
            optimizer.state[parameter] = states[name]


class WholeState(ABC):
    """The saving half of `Engine`."""

    config: ParallelConfig
    max_grad_norm: float | None
    optimizer: Optimizer | None
    step_index: int
    _supervisor: Supervisor

    @abstractmethod
    def _built(self) -> BuiltRank:
        """Returns what this rank trains with."""

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """Whether there is anything to train with yet."""

    @property
    @abstractmethod
    def groups(self) -> Groups:
        """Returns the groups of this rank."""

    @abstractmethod
    def meet(self, call: str) -> None:
        """Waits until every rank has come to the same `call`."""

    @abstractmethod
    def flush(self) -> None:
        """Brings this rank's parameters up to date."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole model's weights ("model") and optimizer state ("optimizer"), by the model's own names, and
        the number of steps ("step_index"); all ranks call.

        The same on every rank, on the CPU, independent of dp, tp, pp and segments: every rank needs memory for all of
        it. Quantised weights, which are frozen, are left out, and `load_state_dict` leaves them alone. With
        gradient_delay=1 it also has the gradients that wait for their update.

        Raises: CheckpointError for an optimizer state that cannot be put together from parts; RankError when a rank
            fails or does not call.
        """
        self.meet("engine.state_dict()")
        cut, world = self._built().cut, self.groups.world
        self._between_steps()
        self.drain()
        with self._supervisor.together("gathering the state"), self.whole_optimizer_state():
            full = {
                "model": gather_model(cut, world),
                "optimizer": gather_optimizer(cut, self.optimizer, world),
                "step_index": self.step_index,
            }
            late, settings = self.late_gradients()
            if settings is not None:
                mine: dict[Any, Any] = {n: _to_cpu(one) for n, one in late.items() if parameter_of(n) in cut.primary()}
                shards = ((name, cut.parts.shard_of(parameter_of(name))) for name in mine)
                full["late_gradients"] = _merge(mine, {n: one for n, one in shards if one is not None}, cut, world)
                full["late_settings"] = settings
            return full

    @contextlib.contextmanager
    def whole_optimizer_state(self) -> Iterator[None]:
        """A context in which weights are up to date and this rank has the whole optimizer state of its parameters.

        The body may change the state, in the same way on all replicas. All ranks run it.
        """
        sync = self._built().sync
        sync.collect_state()
        try:
            yield
        finally:
            sync.split_state()

    @contextlib.contextmanager
    def own_optimizer_state(self) -> Iterator[list[tuple[Piece, dict[str, Any]]]]:
        """A context that yields this replica's part of the state of parameters that the replicas step in parts
        (zero1), by piece. In it weights are up to date, and the optimizer's other state may be read."""
        self._built().sync.settle()
        keeper = self.keeps_pieces
        with contextlib.ExitStack() as stack:
            yield [] if keeper is None else stack.enter_context(keeper.held_state())

    @property
    def keeps_pieces(self) -> BucketwiseOptimizer | None:
        """The optimizer of what the replicas step in parts; None without an optimizer, or with one replica."""
        return self._built().sync.keeps_pieces

    def load_state_dict(self, full: Mapping[str, Any]) -> None:
        """Copies this rank's share of what `state_dict` returned, under any layout, into model and optimizer.

        All ranks call, with the same state.

        Raises: CheckpointError, before anything has changed, when names or shapes do not match.
        """
        rank = self._built()
        late, settings = full.get("late_gradients", {}), full.get("late_settings")
        check_late(settings, self.config)
        self._between_steps()
        self.drain()  # what is left of a step is one of the weights before these
        self.flush()

        def fill(name: str, gradient: torch.Tensor) -> bool:
            if name in late:
                gradient.copy_(rank.cut.parts.take(parameter_of(name), late[name]))
            return name in late

        with contextlib.nullcontext() if self.keeps_pieces is None else self.keeps_pieces.opened_state():
            load(rank.cut, self.optimizer, full, on_host=self.config.offload_optimizer)
        rank.sync.split_state()
        self.load_late_gradients(settings, fill)
        self.step_index = int(full["step_index"])

    def late_gradients(self) -> tuple[Tensors, list[dict[str, Any]] | None]:
        """Returns what gradient_delay=1 keeps for later updates; all ranks call. The bits of later steps do not change.

        Returns: by name the mean gradients of the parameters that this rank holds, valid until the next step, and the
            optimizer's settings for their update, as JSON takes them. `flush=False` adds versions of weights that later
            steps need, as "NAME@1" of one update ago, and so on, and delay_correction="predict" what the last update
            added, as "NAME@update1". ({}, None) if nothing is kept.
        Raises: CheckpointError where stages step with other groups or settings.
        """
        self._between_steps()
        late, versions = self._late, self._versions
        waits = late is not None and late.settings is not None
        if not waits and versions is None:
            return {}, None
        self.drain()
        tensors = {} if versions is None else versions.by_name()
        if late is None or late.settings is None:
            return tensors, []
        settings, world = late.settings.saved(), self.groups.world
        if any(one != settings for one in world.share_replica(world.gather_replica(settings))):
            raise CheckpointError(
                "the optimizer has other groups, or other settings of them, on other stages, and a state with late "
                "gradients has those of all parameters once: make the same groups on every process (a group may have "
                "no parameters on some), or save after engine.finish_updates()"
            )
        return tensors | late.whole(), settings

    def load_late_gradients(
        self,
        settings: list[dict[str, Any]] | None = None,
        fill: Callable[[str, torch.Tensor], bool] = lambda name, gradient: False,
    ) -> None:
        """Replaces what gradient_delay=1 keeps for later updates; all ranks call.

        Args:
            settings: as `late_gradients` returned them. None: nothing is kept any more.
            fill: called with a name that `late_gradients` returned and this rank's tensor for it; fills the tensor and
                returns whether there was anything to fill it with.
        Raises: CheckpointError if some versions of weights that this rank needs are there and others are missing.
        """
        self._between_steps()
        self.drain()
        if self._late is not None:
            optimizer = self.optimizer
            taken = Settings.of_saved(optimizer, settings) if settings and optimizer is not None else None
            self._late.load(taken, fill)
        versions, sync = self._versions, self._built().sync
        if versions is None or not isinstance(sync, Versioned):
            return
        missing = [] if settings is None else versions.load(fill)
        if missing and len(missing) < len(versions.by_name()):
            raise CheckpointError(
                f"the state has no version {missing[0]} of the weights, which this stage needs: it was saved with "
                "another pp, cut of the model or weight_versions, whose gradients are late in another way"
            )
        if settings is None or missing:
            sync.forget_versions()

    def drain(self) -> None:
        """Runs the backwards that `flush=False` has left to the next step; all ranks call.

        The bits of later steps do not change. Evaluations, and methods that read or write the state, call it.
        """
        if self.is_built:
            with self._supervisor.together("ending the last step"):
                self._built().step.drain()

    def finish_updates(self, max_grad_norm: float | None = None) -> torch.Tensor | None:
        """Applies the gradients that gradient_delay=1 keeps for the next step; all ranks call, at the end of training.

        Args:
            max_grad_norm: global norm to which they are clipped. None: the engine's.
        Returns: their norm before clipping, scalar; None if nothing was kept, or with PipeDream's weight_versions.
        """
        if not self.is_built:
            return None
        self._between_steps()
        limit = self.max_grad_norm if max_grad_norm is None else max_grad_norm
        return self._built().step.finish_updates(limit)

    @property
    def _versions(self) -> WeightVersions | None:
        sync = self._built().sync
        return sync.versions if isinstance(sync, Versioned) and sync.keeps_versions else None

    @property
    def _late(self) -> LateGradients | None:
        sync = self._built().sync
        return sync.late if isinstance(sync, DpSync) else None

    def _between_steps(self) -> None:
        """Raises: ConfigError where late gradients would be those of a step that is not over."""
        sync = self._built().sync
        if isinstance(sync, DpSync) and sync.late is not None:
            sync.between_steps()

    def resume_at(self, step_index: int) -> None:
        """Sets the number of the next step, from 0. Dropout masks depend on it."""
        self.step_index = step_index


def check_late(settings: Any, config: ParallelConfig) -> None:
    """Raises CheckpointError for a state with gradients that this run would never take."""
    if settings and (not config.gradient_delay or config.updates_each_micro_batch):
        raise CheckpointError(
            "the state was saved with gradient_delay=1, between a step's gradients and their update, and this run "
            f"has gradient_delay={config.gradient_delay} and weight_versions={config.weight_versions!r}; set "
            'gradient_delay=1 and weight_versions="2bw", or save after engine.finish_updates()'
        )


def _states(
    cut: RankModel, optimizer: Optimizer, saved: Mapping[str, Mapping[str, Any]], on_host: bool
) -> dict[str, dict[str, Any]]:
    """Returns this rank's part of the state of each parameter that the optimizer steps."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    states: dict[str, dict[str, Any]] = {}
    for name, parameter in cut.parameters.items():
        group = groups.get(id(parameter))
        if name in saved and group is not None:  # else the optimizer does not step it, such as one that is frozen now
            # Where torch's optimizers keep their step counter.
            on_device = bool(group.get("fused") or group.get("capturable"))
            whole = cut.parts.whole_shape(name, parameter.shape)
            with host_memory() if on_host else contextlib.nullcontext():
                states[name] = {
                    key: like_parameter(
                        key,
                        part_of_state(name, key, value, whole, cut.parts),
                        parameter,
                        on_device=on_device and key == "step",
                        on_host=on_host,
                    )
                    for key, value in saved[name].items()
                }
    return states


def _merge(mine: dict[Any, Any], spread: Shards, cut: RankModel, world: WorldGroup) -> dict[Any, Any]:
    """Returns what all ranks of the replica have, put together: of what several shards hold, the first one's."""
    rank = cut.parts.rank
    if world.pipeline.size * world.tensor.size == 1:
        return mine
    if rank > 0:  # the first shard has the rest, but for the numbers of parameters of which its part is nothing
        mine = {key: value for key, value in mine.items() if key in spread or not _is_large(value)}
    shares: list[Any] = world.share_replica(world.gather_replica((rank, mine, spread)))
    held: dict[Any, list[tuple[int, Any]]] = {}
    shards: Shards = {}
    for place, values, how in shares:
        for key, value in values.items():
            held.setdefault(key, []).append((place, value))
        shards.update(how)
    return {key: assembled(f"{key}", values, shards.get(key)) for key, values in held.items()}


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
