"""DpSync: sums gradients over the replicas bucket by bucket and updates parameters when the next forward needs them.

The order of one step (Fold3D section V, made exact):

    backward       a bucket is reduce-scattered as soon as its gradients are complete; an "early" bucket's reduced
                   gradients are gathered in idle network time
    norm           one exchange of numbers, over the replicas and then over the stages: the exact global norm, and
                   whether the next step begins with buffers of replica 0
    update         a "zero1" bucket's own shard is stepped, its parameters are gathered
    next forward   layer by layer: what a layer needs is waited for, an "early" bucket is stepped, the layer runs

Every way gives the same bits: the same sums, the same norm, the same element-wise arithmetic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fold3d import _C
from fold3d.comms import abortable_collectives
from fold3d.comms.groups import Groups
from fold3d.data_parallel import optimizer_state
from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.bucket_optimizer import BucketOptimizer, Settings, check_separable
from fold3d.data_parallel.bucket_schedule import BucketSchedule
from fold3d.data_parallel.buffers import BufferSync
from fold3d.data_parallel.grad_norm import all_reduce_norm
from fold3d.data_parallel.gradients import norm_dtype, share_first
from fold3d.data_parallel.parameter_readiness import ParameterReadiness
from fold3d.data_parallel.pending import PendingGradient
from fold3d.data_parallel.reducer import Reducer
from fold3d.errors import ConfigError
from fold3d.faults.progress import Progress
from fold3d.observe.step_breakdown import RawRecord
from fold3d.stage.rank_model import RankModel
from fold3d.topology import Topology

logger = logging.getLogger(__name__)

_ACTION = {"reduce": "REDUCE_GRAD", "gather": "GATHER"}


class DpSync:
    """DP.sync of one rank; all replicas of a stage make the same calls. For dp > 1.

    Without an optimizer (`attach`) a step ends with the mean gradients in `.grad`; with one, with `update`. A `whole`
    step does both: `update` takes what was made of the gradients meanwhile.
    """

    def __init__(
        self,
        cut: RankModel,
        topology: Topology,
        groups: Groups,
        sync: _C.BucketSync,
        plan: BucketSchedule,
        progress: Progress,
    ):
        self._cut, self._topology, self._groups, self._sync = cut, topology, groups, sync
        self._progress = progress
        self._buffers = BufferSync(cut, groups.data, progress)
        self.plan = plan
        self.buckets = [
            Bucket(number, spec, cut.parameters, topology.dp, topology.dp_rank)
            for number, spec in enumerate(plan.buckets)
        ]
        self._summed = {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}
        uses = {name: sum(v % topology.pp == topology.pp_rank for v in c) for name, c in cut.placement.owners.items()}
        self._readiness = ParameterReadiness(cut.model, self.buckets, self._open, lambda: self.read())
        self._reducer = Reducer(self.buckets, uses, self._reduce, self._readiness.is_closed)
        self.read: Callable[[], None] = self.flush
        """What makes weights complete for whoever reads them; the engine puts in one that tells of failures."""
        self._optimizer: Optimizer | None = None
        self._parts: dict[int, BucketOptimizer] = {}
        self._pending: dict[int, Settings] = {}  # early buckets that are to be stepped when they are opened
        self._collected = False  # the optimizer's state is whole
        self._norm_dtype = norm_dtype(cut.model)  # not in the vote, for which all ranks wait
        self._norm: torch.Tensor | None = None
        self._begun = False  # gradients are on their way that neither update() nor abandon() has taken
        self._handed_over = False  # all of them, so that they arrive whatever this rank does next
        # This step's, or the last one's, gradients are whole in `.grad` although there is an optimizer.
        self._whole = False
        self._shown: list[tuple[Parameter, Tensor | None]] = []  # what `.grad` held when a whole step was taken
        self._step = 0
        self._waits: list[RawRecord] = []

    # One step

    def begin(self, micro_batches: int, chunks: Sequence[int], *, whole: bool = False) -> None:
        """Prepares the gradients of one step; what the step before left to do stays to be done.

        Args:
            chunks: of this rank, in the order of their last backwards.
            whole: the gradients shall be in `.grad` between `end` and `update`, which takes them from there.
        """
        if self._begun:
            self.abandon()
        self.check_trainable()
        self._buffers.begin()
        for bucket in self.buckets:
            if self._optimizer is None or self._whole:
                bucket.clear()
            if not self._readiness.is_closed(bucket):
                bucket.attach()
        self._norm, self._shown = None, []
        self._whole = whole and self._optimizer is not None
        self._begun, self._handed_over = True, False
        self._step += 1
        lazy = self._optimizer is not None and not self.plan.serial
        self._sync.begin(self._step, list(self.plan.gather_order) if lazy else [])
        self._reducer.begin(micro_batches, chunks, hold=self.plan.serial)

    def before_chunk(self, chunk: int) -> None:
        """Waits for the parameters that any module of the chunk may read."""
        self._readiness.before_chunk(chunk)

    def chunk_done(self, chunk: int) -> None:
        """The chunk's last backward is done."""
        self._readiness.open_chunk(chunk)  # of layers that no forward came by
        self._reducer.chunk_done(chunk)

    def end(self) -> None:
        """All backwards are done. Without an optimizer, leaves the mean gradients in `.grad`, tied ones not summed; a
        whole step has these summed, too."""
        self._reducer.release()
        self._handed_over = True
        if self._optimizer is not None and not self._whole:
            for bucket in self.buckets:
                bucket.veil(taken=False)  # nobody may take half-summed gradients for the mean
            return
        self._wait_reduced()
        if self._whole:
            self._sum_tied()
        self._gather_gradients(self.buckets)
        self._share_use()
        for bucket in self.buckets:
            bucket.expose()
        self._begun = self._whole

    @property
    def keeps_gradients(self) -> bool:
        """Whether the step's gradients are not in `.grad`, so that `norm` and `update` have to be asked."""
        return self._optimizer is not None and not self._whole

    def norm(self) -> torch.Tensor:
        """Returns the exact global gradient norm, the same on every rank; all ranks call (one all-reduce)."""
        if self._norm is None and not self._begun:  # no step has run
            return torch.zeros((), dtype=self._norm_dtype)
        if self._norm is None:
            self._wait_reduced()
            self._sum_tied()
            unused = sum(not used for bucket in self.buckets for used in bucket.used)
            primary = self._cut.primary()
            shards = [b.gradients[p.start : p.stop] for b in self.buckets for p in b.pieces if p.name in primary]
            (total, changed), norm = all_reduce_norm([unused, self._buffers.changed()], shards, self._groups.world)
            self._buffers.agree(changed > 0)
            self._norm = norm.to(self._norm_dtype)
            if total:
                self._share_use()
        return self._norm

    def update(self, coefficient: float) -> None:
        """Begins the optimizer's step, with its settings of now and gradients scaled by `coefficient`.

        Parameters are up to date when their arbiters are open (`flush` opens all).
        """
        assert self._optimizer is not None
        if not self._begun:  # there are no gradients: as an optimizer that finds none
            return
        self._check_parameters()
        if self._whole:
            self._take_back()
        else:
            self._check_gradients()
            self.norm()
        settings = Settings.of(self._optimizer, coefficient)
        for bucket in self.buckets:
            bucket.detach()
            if self.plan.modes[bucket.number] == "zero1":
                self._step_shard(bucket, settings)
            else:
                self._pending[bucket.number] = settings
                planned = bucket.number in self.plan.gather_order and not self.plan.serial
                if not planned and not self._whole:
                    self._sync.gather(bucket.number, bucket.gradients)
            self._readiness.close(bucket)
        self._begun = False
        if self.plan.serial or self._whole:
            self.flush()

    def updated(self) -> None:
        """The optimizer's own step is over: `.grad` holds what it took, or says that it is gone."""
        if self._whole:
            for parameter, gradient in self._shown:
                parameter.grad = gradient
        elif self._optimizer is not None and self._step:
            for bucket in self.buckets:
                bucket.veil(taken=True)

    def abandon(self) -> None:
        """Drops the gradients of a step that will not be taken, such as one with infinite gradients."""
        self._reducer.release()
        self._wait_reduced()
        for bucket in self.buckets:
            if bucket.number not in self._pending:
                self._wait_gathered(bucket)
                bucket.detach()
                bucket.clear()
        self._begun = self._whole = False

    def flush(self) -> None:
        """Brings all parameters of this rank up to date. Meets nobody: the other replicas' part is under way."""
        self._readiness.open_all()

    def finish(self) -> None:
        """Waits for what is under way: the weights become final, and no replica misses what this rank passes on."""
        try:
            if self._begun and self._handed_over:
                self._wait_reduced()
            if self._handed_over or not self._begun:  # else gathers may wait for sums that nobody will begin
                for bucket in self.buckets:
                    self._wait_gathered(bucket)
            self.flush()
        except _C.CommError as error:
            logger.warning("the weights of the last step are incomplete: %s", error)

    def rest(self) -> None:
        """Another engine is about to use the model: weights become final, gradients are not ours.

        Raises: ConfigError between `run` and the optimizer's step.
        """
        if self._begun:
            raise ConfigError(
                "another engine was about to use the model between this one's run and optimizer.step(); step first"
            )
        self.flush()
        self._reducer.listens = False

    def resume(self) -> None:
        """The model is ours again; what the other engine made of the weights is kept."""
        self._reducer.listens = True
        for bucket in self.buckets:
            if bucket.weights is not None and not all(bucket.holds(parameter) for parameter in bucket.parameters):
                bucket.flatten_parameters()

    # The optimizer

    def attach(self, optimizer: Optimizer, *, parts: bool) -> None:
        """Steps `optimizer` bucket by bucket from now on.

        Args:
            parts: whether any stage steps parts of parameters (zero1).
        Raises: ConfigError when parts of parameters shall be stepped and the optimizer cannot do that exactly.
        """
        if self._begun:
            raise ConfigError("attach the optimizer before the step's `run`, not between it and optimizer.step()")
        check_separable(optimizer, parts=parts)
        for bucket in self.buckets:
            bucket.detach()
            bucket.clear()
            if self.plan.modes[bucket.number] == "zero1":
                bucket.flatten_parameters()
                weights = bucket.weights
                assert weights is not None
                tensors = [(piece, piece.of(weights)) for piece in bucket.pieces]
                part = BucketOptimizer(optimizer, tensors, sharded=True)
                optimizer_state.scatter(bucket, part, optimizer)
            else:
                whole = [(piece, piece.parameter) for piece in bucket.all_pieces]
                part = BucketOptimizer(optimizer, whole, sharded=False)
            self._parts[bucket.number] = part
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Optimizer | None:
        """The attached optimizer."""
        return self._optimizer

    def collect_state(self) -> None:
        """Fills the optimizer's state with what the replicas hold in parts; all replicas call. See `split_state`."""
        self.flush()
        for bucket in self._zero1():
            assert self._optimizer is not None
            whole = optimizer_state.gather(bucket, self._parts[bucket.number], self._groups.data)
            self._optimizer.state.update(whole)
        self._collected = True

    def before_state_dict(self) -> None:
        """The optimizer's state is about to be read. Raises ConfigError when this replica has only a part of it."""
        self.flush()
        if not self._collected and any(self._parts[bucket.number].twin.state for bucket in self._zero1()):
            raise ConfigError(
                "each replica keeps a part of the optimizer's state; take engine.state_dict(), or read it inside `with "
                "engine.whole_optimizer_state():`, on all ranks"
            )

    def release_state(self) -> None:
        """Drops what `collect_state` put together."""
        self._collected = False
        for bucket in self._zero1():
            assert self._optimizer is not None
            optimizer_state.drop(bucket, self._optimizer)

    def split_state(self) -> None:
        """Keeps this rank's part of a state that was loaded whole into the optimizer."""
        for bucket in self._zero1():
            assert self._optimizer is not None
            optimizer_state.scatter(bucket, self._parts[bucket.number], self._optimizer)

    def _zero1(self) -> list[Bucket]:
        if self._optimizer is None:
            return []
        return [bucket for bucket in self.buckets if self.plan.modes[bucket.number] == "zero1"]

    def check_trainable(self) -> None:
        """Raises ConfigError when a parameter is trained whose gradients nobody sums over the replicas."""
        for name, parameter in self._cut.parameters.items():
            if parameter.requires_grad and parameter.numel() and id(parameter) not in self._summed:
                raise ConfigError(
                    f"{name} was frozen when the engine was built and is trained now: its gradients would not be "
                    "summed over the replicas. Let it be trainable in the first step (it may be frozen later), or go "
                    "on with a new Engine or Trainer after unfreezing"
                )

    # Inside

    def _take_back(self) -> None:
        """Makes what `.grad` holds the step's gradients; copies of tied weights get those of the first stage."""
        self._shown = [(parameter, parameter.grad) for bucket in self.buckets for parameter in bucket.parameters]
        for bucket in self.buckets:
            bucket.take_back()
        for bucket in self._tied():
            stages = bucket.spec.stages
            share_first(bucket.gradients, bucket.used, stages, self._topology, self._groups.ties[stages])

    def _check_gradients(self) -> None:
        """Raises ConfigError when somebody meant to give the optimizer gradients of their own."""
        for bucket in self.buckets:
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                if not isinstance(parameter.grad, PendingGradient):
                    what = "taken away" if parameter.grad is None else "set"
                    raise ConfigError(
                        f"{name}.grad was {what} between run and optimizer.step(), but the summed gradients are not in "
                        ".grad; clip with engine.clip_grad_norm, or pass reads_gradients=True to Engine.run"
                    )

    def _check_parameters(self) -> None:
        """Raises ConfigError when parameters or groups are not what the optimizer was attached with."""
        assert self._optimizer is not None
        for bucket in self.buckets:
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                if bucket.weights is not None and not bucket.holds(parameter):
                    raise ConfigError(
                        f"{name} got other memory after the engine was built (.data was assigned, or .to() called); "
                        "change weights in place, or make a new Engine"
                    )
        count = len(self._optimizer.param_groups)
        if any(len(part.twin.param_groups) != count for part in self._parts.values()):
            raise ConfigError("a parameter group was added after the optimizer was attached; make a new Engine")

    def _reduce(self, bucket: Bucket) -> None:
        self._sync.reduce(bucket.number, bucket.gradients, 1.0 / self._topology.dp)

    def _step_shard(self, bucket: Bucket, settings: Settings) -> None:
        gradients = {p.index: p.of(bucket.gradients) for p in bucket.pieces if bucket.used[p.index]}
        self._parts[bucket.number].step(gradients, settings)
        assert bucket.weights is not None
        self._sync.gather(bucket.number, bucket.weights)
        if not self._whole:
            bucket.clear()

    def _open(self, bucket: Bucket) -> None:
        self._wait_gathered(bucket)
        settings = self._pending.pop(bucket.number, None)
        if settings is not None:
            gradients = {k: view for k, view in enumerate(bucket.views) if bucket.used[k]}
            self._parts[bucket.number].step(gradients, settings)
            if not self._whole:
                bucket.clear()
        if self._begun:
            bucket.attach()

    def _gather_gradients(self, buckets: Sequence[Bucket]) -> None:
        planned = self.plan.gather_order if self._optimizer is not None and not self.plan.serial else ()
        for bucket in buckets:
            if bucket.number not in planned:  # else it is on its way
                self._sync.gather(bucket.number, bucket.gradients)
        for bucket in buckets:
            self._wait_gathered(bucket)

    def _sum_tied(self) -> None:
        for bucket in self._tied():
            shard, group = bucket.gradients[bucket.shard], self._groups.ties[bucket.spec.stages]
            abortable_collectives.all_reduce(shard, group, self._progress)

    def _share_use(self) -> None:
        """A parameter counts as used when any replica, and of tied ones any stage, used it."""
        used = [used for bucket in self.buckets for used in bucket.used]
        flags = torch.tensor([self._buffers.changed(), *used], dtype=torch.uint8)
        self._groups.data.all_reduce(flags, torch.maximum)
        values = iter(flags.tolist())
        self._buffers.agree(bool(next(values)))
        for bucket in self.buckets:
            bucket.used = [bool(next(values)) for _ in bucket.used]
        for bucket in self._tied():
            shared = torch.tensor(bucket.used, dtype=torch.uint8)
            abortable_collectives.all_reduce(
                shared, self._groups.ties[bucket.spec.stages], self._progress, dist.ReduceOp.MAX
            )
            bucket.used = [bool(flag) for flag in shared.tolist()]

    def _tied(self) -> list[Bucket]:
        """Returns the buckets that other stages have, too, in an order that is the same on all of them."""
        return sorted((b for b in self.buckets if len(b.spec.stages) > 1), key=lambda bucket: bucket.names)

    def _wait_reduced(self) -> None:
        start = time.monotonic_ns()
        with self._progress.during(f"the gradient sums of step {self._step}", meets=True):
            for bucket in self.buckets:
                self._sync.wait_reduced(bucket.number)
        last = self.buckets[0].spec.chunk if self.buckets else 0
        self._waits.append(("wait", f"{last}REDUCE_GRAD", start, time.monotonic_ns(), 0))

    def _wait_gathered(self, bucket: Bucket) -> None:
        if self._sync.is_gathered(bucket.number):
            return
        start = time.monotonic_ns()
        with self._progress.during(f"the gather of step {self._step}", meets=True):
            self._sync.wait_gathered(bucket.number)
        self._waits.append(("wait", f"{bucket.spec.chunk}GATHER", start, time.monotonic_ns(), 0))

    def take_records(self) -> list[RawRecord]:
        """Returns the transfers and the waits since the last call, by chunk."""
        waits, self._waits = self._waits, []
        chunk_of = {f"bucket {b.number}": b.spec.chunk for b in self.buckets}
        transfers = [
            (lane, f"{chunk_of[text]}{_ACTION[lane]}", start, end, size)
            for lane, text, start, end, size in self._sync.take_records()
        ]
        return [*waits, *transfers]

    def bandwidth(self) -> float:
        """Returns the measured bytes per second that this rank sends; 0.0 when nothing was measured yet."""
        return self._sync.bandwidth()

    def abort(self, reason: str) -> None:
        """Ends all communication; any thread."""
        self._sync.abort(reason)

    def close(self) -> None:
        """Ends the threads and takes the hooks off the model."""
        self._readiness.remove()
        self._reducer.remove()
        self._sync.close()
