"""DpSync: sums gradients over the replicas bucket by bucket and updates parameters when the next forward needs them.

The order of one step (Fold3D section V, made exact):

    backward       a bucket is reduce-scattered as soon as its gradients are complete; an "early" bucket's reduced
                   gradients are gathered in idle network time
    norm           one exchange of numbers, over the replicas, then over the stages and their shards: the exact global
                   norm, whether the next step begins with buffers of replica 0, and whether anybody froze parameters
    update         a "zero1" bucket's own shard is stepped, its parameters are gathered
    next forward   layer by layer: what a layer needs is waited for, an "early" bucket is stepped, the layer runs

On an accelerator it is streams that wait: the host goes on as soon as what it waits for has been launched.

Every way gives the same bits: the same sums, the same norm, the same element-wise arithmetic.

With gradient_delay=1 norm and update are of gradients of the step before, which are summed under it (`LateGradients`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fold3d import _C
from fold3d.comms.consistency import compare
from fold3d.comms.groups import Groups
from fold3d.comms.world_group import WorldGroup
from fold3d.config import ParallelConfig
from fold3d.data_parallel import gradients
from fold3d.data_parallel.bucket import RUNS_ANEW, Bucket
from fold3d.data_parallel.bucket_schedule import BucketSchedule
from fold3d.data_parallel.buffers import BufferSync
from fold3d.data_parallel.gradient_states import Event, GradientStates, State
from fold3d.data_parallel.gradient_sync import GradientSync
from fold3d.data_parallel.late.late_gradients import LateGradients
from fold3d.data_parallel.optimizer.bucket_optimizer import Settings
from fold3d.data_parallel.optimizer.bucketwise_optimizer import BucketwiseOptimizer
from fold3d.data_parallel.optimizer.host_copies import check_room
from fold3d.data_parallel.optimizer.host_steps import held
from fold3d.data_parallel.optimizer.separable import check_separable, check_steps, compare_settings
from fold3d.data_parallel.parameter_readiness import ParameterReadiness
from fold3d.data_parallel.reducer import Reducer
from fold3d.data_parallel.tied_buckets import TiedBuckets
from fold3d.data_parallel.transfers import BucketTransfers, NoReplicas
from fold3d.errors import ConfigError
from fold3d.observe.step_breakdown import RawRecord
from fold3d.stage.rank_model import RankModel
from fold3d.trace.coat import Coat

logger = logging.getLogger(__name__)


class DpSync(GradientSync):
    """DP.sync of one rank; all replicas of a stage (with tensor parallelism, of its shard) make the
    same calls. For dp > 1, and for late gradients.

    Without an optimizer (`attach`) a step ends with the mean gradients in `.grad`; with one, with `update`. A `whole`
    step does both: `update` takes what was made of the gradients meanwhile. What may follow what: `GradientStates`.
    """

    def __init__(
        self,
        cut: RankModel,
        groups: Groups,
        config: ParallelConfig,
        rings: _C.BucketSync | NoReplicas,
        plan: BucketSchedule,
        clock: _C.StreamClock,
        read: Callable[[], None],
    ):
        """Args:
        rings: that move the buckets; with `clock`.
        read: calls `settle`, and tells of failures; for whoever reads or writes weights that wait for their update.
        Raises: ConfigError for gradients that cannot be summed as `config` says.
        """
        topology, progress = groups.topology, groups.world.progress
        wire = torch.bfloat16 if config.dp_sync_dtype == "bfloat16" else torch.float32
        self._cut, self._groups, self._tp, self._device = cut, groups, topology.tp, groups.device
        self._plan, self._on_host, self._kernels = plan, config.offload_optimizer, config.kernels == "fold3d"
        self._feeds_back = config.delay_correction == "error_feedback"
        delay = 0 if config.updates_each_micro_batch else config.gradient_delay
        self.buckets = [
            Bucket(number, spec, cut.parameters, topology.dp, topology.dp_rank, 1 + delay)
            for number, spec in enumerate(plan.buckets)
        ]
        self._states = GradientStates()
        self._early: Sequence[int] = ()  # buckets whose gradients of this step are gathered as soon as they are summed
        self._whole = False  # this step's gradients shall be in `.grad` although there is an optimizer
        self._transfers = BucketTransfers(rings, self.buckets, topology.dp, progress, clock, wire)
        self._tied_parameters = gradients.tied_parameters(cut, groups)
        self._tied = TiedBuckets(self.buckets, groups.ties, topology, progress)
        self._late: LateGradients | None = None
        if delay:
            self._late = LateGradients(self.buckets, self._transfers, self._tied, self.settle, self._share_use)
        self._buffers = BufferSync(cut, groups.data, progress)
        self._coat = cut.coat.enter_context(Coat())
        uses = {name: len(cut.placement.readers_on(name, cut.stage)) for name in cut.placement.readers}
        self._readiness = ParameterReadiness(self._coat, cut.model, self.buckets, self._open, self._touched)
        self._read = read
        self._reducer = Reducer(self._coat, self.buckets, uses, self._transfers.reduce, self._is_stale)
        self._optimizer: BucketwiseOptimizer | None = None
        self._summed = {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}
        self._norm_dtype = gradients.norm_dtype(cut.model)  # not when the norm is made, for which all ranks wait
        self._trained = self._requires_grad()  # as all replicas have it
        self._norm: Tensor | None = None  # of the step's gradients
        self._coefficient: gradients.Factor = 1.0  # by which the optimizer shall scale them
        self._shown: list[tuple[Parameter, Tensor | None]] = []  # what `.grad` held when the optimizer took it

    # One step

    def begin(self, micro_batches: int, chunks: Sequence[int], *, whole: bool = False) -> None:
        """Prepares the gradients of one step; what the step before left to do stays to be done.

        Args:
            chunks: of this rank, in the order of their last backwards.
            whole: the gradients shall be in `.grad` between `end` and `update`, which takes them from there.
        """
        if self._late is not None and (whole or self._optimizer is None):
            raise ConfigError(
                "gradient_delay=1 keeps gradients until the next step, for an optimizer that Engine.attach was given, "
                "and never has them in .grad; attach one, and pass reads_gradients=False, or set gradient_delay=0"
            )
        if self._states.allows(Event.DROP):
            self.abandon()
        self.check_trainable()
        self._buffers.begin()
        is_left = self._states.state is State.LEFT
        self._states.on(Event.BEGIN)
        for bucket in self.buckets:
            if is_left:
                bucket.clear()
            if not self._readiness.is_closed(bucket):
                bucket.attach()
        self._norm, self._coefficient, self._shown = None, 1.0, []
        self._whole = whole and self._optimizer is not None
        # Late gradients are gathered behind what the update before them gathers, so `update` begins that.
        self._early = () if self._optimizer is None or self._plan.serial else self._plan.gather_order
        self._transfers.begin(self._early if self._late is None else ())
        self._reducer.begin(micro_batches, chunks, hold=self._plan.serial)

    def check_taken(self, why: str = RUNS_ANEW) -> None:
        """Raises ConfigError where the step before has summed gradients that nobody has taken, or off `.grad`.

        Args:
            why: they would be lost.
        """
        if self._optimizer is not None and self._states.state in (State.SUMMING, State.SHOWN):
            self._optimizer.check_dropped(why)

    def between_steps(self) -> None:
        """Drops what is left of a step that nobody takes; all replicas call before they look at late gradients.

        Raises: ConfigError where an optimizer may still take it.
        """
        self.check_taken(
            "the state of gradient_delay=1 is that between two steps, and nobody has taken the gradients of the run"
        )
        if self._states.allows(Event.DROP):
            self.abandon()

    def before_chunk(self, chunk: int) -> None:
        """Waits for the parameters that any module of the chunk may read."""
        self._readiness.before_chunk(chunk)

    def chunk_done(self, chunk: int) -> None:
        """The chunk's last backward is done."""
        self._readiness.open_chunk(chunk)  # of layers that no forward came by
        self._reducer.chunk_done(chunk)

    def end(self) -> None:
        """All backwards are done. Without an optimizer, and in a whole step, leaves the mean gradients in `.grad`,
        those of weights that several ranks of a replica hold summed over them."""
        self._states.on(Event.HAND_OVER)
        for bucket in self.buckets:
            bucket.check_attached()
        self._reducer.release()
        if self._optimizer is not None and not self._whole:
            for bucket in self.buckets:
                bucket.veil(taken=False)  # nobody may take half-summed gradients for the mean
            if self._late is not None:
                self._late.turn()  # what norm and update are of from here on
            return
        self._transfers.wait_reduced()
        if self._whole:
            self._tied.sum()
        self._gather_gradients()
        self._share_use()
        for bucket in self.buckets:
            bucket.expose()
        if self._whole:
            self._states.on(Event.SHOW)
            return
        gradients.sum_tied(self._tied_parameters)
        self._states.on(Event.LEAVE)

    def norm(self) -> Tensor:
        """Returns the exact global gradient norm, the same on every rank; all ranks call (one all-reduce). Of late
        gradients that of the step before, zero where there is none."""
        if self._optimizer is None or self._states.in_grad:
            return gradients.global_norm(
                self._cut, self._norm_dtype, self._device, self._groups.world, kernel=self._kernels
            )
        is_none = self._late is not None and self._late.settings is None
        if self._norm is None and (is_none or not self._states.has_gradients):  # no step has run
            return torch.zeros((), dtype=self._norm_dtype, device=self._device)
        if self._norm is None:
            self._norm = self._sum_norm()
        return self._norm * self._coefficient

    def scale(self, coefficient: gradients.Factor) -> None:
        """Multiplies the step's gradients: where they are in `.grad` now, else when the optimizer takes them."""
        if self._optimizer is None or self._states.in_grad:
            gradients.scale(self._cut.parameters.values(), coefficient)
        else:
            self._coefficient = self._coefficient * coefficient

    def update(self, *, keeps: bool = True) -> None:
        """Begins the optimizer's step, with its settings of now; that of late gradients with those of their step.

        Parameters are up to date when their buckets are open (`flush` opens all).

        Args:
            keeps: whether this step has made gradients, which then are the next late ones.
        """
        optimizer = self._optimizer
        assert optimizer is not None
        if not self._states.has_gradients:  # as an optimizer that finds none
            return
        optimizer.check_unchanged()
        is_shown = self._states.state is State.SHOWN
        if is_shown:
            self._take_back()
        else:
            for bucket in self.buckets:
                bucket.check_veiled()
            self.norm()
        settings = optimizer.settings(self._coefficient)
        taken = self._taken_with(settings)
        gathered = self._early if self._late is None else self._late.gathered
        for bucket in self.buckets:
            bucket.detach()
            if taken is None:
                continue
            if self._plan.modes[bucket.number] == "zero1":
                optimizer.step_shard(bucket, taken)
                self._transfers.gather_weights(bucket)
                if not is_shown:
                    bucket.clear()
            else:
                optimizer.postpone(bucket, taken)
                if not is_shown and bucket.number not in gathered:
                    self._transfers.gather_gradients(bucket)
            bucket.note_writes()
            self._readiness.close(bucket)
        if self._late is not None:
            self._late.keep(settings if keeps else None, self._early)
        self._states.on(Event.TAKE)
        self._coefficient = 1.0
        if self._plan.serial or is_shown or self._readiness.waits_unseen:
            self.flush()

    def _taken_with(self, settings: Settings) -> Settings | None:
        """Returns the settings that the gradients of now are taken with; None where there are none."""
        return settings if self._late is None else self._late.taken_with(self._coefficient)

    def updated(self) -> None:
        """The optimizer's own step is over: `.grad` holds what it took, or says that it is gone."""
        if self._states.in_grad:
            for parameter, gradient in self._shown:
                parameter.grad = gradient
        elif self._transfers.step:
            for bucket in self.buckets:
                bucket.veil(taken=True)

    def abandon(self) -> None:
        """Drops the gradients of a step that will not be taken, such as one with infinite gradients, or one that has
        failed where nobody else runs it."""
        if self._states.state is State.ACCUMULATING:
            for chunk in {bucket.spec.chunk for bucket in self.buckets}:
                self.chunk_done(chunk)
            self.end()  # what was added to the buckets goes the way of all gradients
        self._states.on(Event.DROP)
        if self._late is not None:
            self._late.turn()  # those of the step before stay
        self._transfers.wait_reduced()
        for bucket in self.buckets:
            if self._optimizer is None or not self._optimizer.is_postponed(bucket):
                self._transfers.wait_gathered(bucket)
                bucket.detach()
                bucket.clear()

    # Between steps

    def flush(self) -> None:
        """Brings all parameters of this rank up to date. Meets nobody: the other replicas' part is under way."""
        self._readiness.open_all()

    def settle(self) -> None:
        """As `flush`, and nothing that was begun is under way any more: before weights and states are told to anybody,
        it is known whether they came whole. On an accelerator the host waits for it."""
        self.flush()
        self._transfers.drain()

    def finish(self) -> None:
        """Waits for what is under way: the weights become final, and no replica misses what this rank passes on."""
        try:
            if self._states.state in (State.SUMMING, State.SHOWN) and self._late is None:
                self._transfers.wait_reduced()
            # In the middle of a step some may wait for sums that nobody will begin.
            is_whole = self._states.state is not State.ACCUMULATING
            for bucket in self.buckets if is_whole else ():
                self._transfers.wait_gathered(bucket)
            self.flush()
            if is_whole:
                self._transfers.drain()
        except _C.CommError as error:
            logger.warning("the weights of the last step are incomplete: %s", error)

    steps_by_itself = True

    def attach(self, optimizer: Optimizer, *, parts: bool) -> None:
        """Steps `optimizer` bucket by bucket from now on.

        Args:
            parts: whether any stage steps parts of parameters (zero1).
        Raises: ConfigError when parts of parameters shall be stepped and the optimizer cannot do that exactly, or
            shall be stepped on the host and cannot be there; when replicas have optimizers with other settings.
        """
        compare_settings(optimizer, self._groups.world)
        if self._states.has_gradients:
            raise ConfigError("attach the optimizer before the step's `run`, not between it and optimizer.step()")
        if self._kernels:
            check_steps(optimizer)
        state_bytes = check_separable(optimizer, parts=parts, tp=self._tp, on_host=self._on_host)
        sharded = [self._plan.modes[bucket.number] == "zero1" for bucket in self.buckets]
        if self._on_host:
            stepped = {id(parameter) for parameter in held(optimizer, self._cut.parameters).values()}
            pieces = [b.pieces if part else b.all_pieces for b, part in zip(self.buckets, sharded, strict=True)]
            mine = [piece for of in pieces for piece in of if id(piece.parameter) in stepped]
            check_room(state_bytes * sum(piece.stop - piece.start for piece in mine))
        for bucket in self.buckets:
            bucket.detach()
            bucket.clear()
        self._optimizer = BucketwiseOptimizer(
            *(optimizer, self.buckets, sharded, self._groups.data),
            on_host=self._on_host,
            kernel=self._kernels,
            feeds_back=self._feeds_back,
            looked=self._touched,
        )
        self._states.on(Event.ATTACH)

    @property
    def plan(self) -> BucketSchedule:
        """How the buckets are synchronised."""
        return self._plan

    def reschedule(self, gather_order: Sequence[int]) -> None:
        """Gathers early buckets in another order from the next step on, the same on all replicas of the stage.

        Args:
            gather_order: planned buckets, as in `BucketSchedule.of`.
        """
        self._plan = self._plan.in_order(gather_order)

    @property
    def optimizer(self) -> BucketwiseOptimizer | None:
        """The attached optimizer."""
        return self._optimizer

    @property
    def late(self) -> LateGradients | None:
        """The gradients of the step before; None where the optimizer takes those of its own step."""
        return self._late

    def collect_state(self) -> None:
        """Fills the optimizer's state with what the replicas hold in parts; all replicas call. See `split_state`."""
        self.settle()
        if self._optimizer is not None:
            self._optimizer.collect_state()

    @property
    def keeps_pieces(self) -> BucketwiseOptimizer | None:
        """Who keeps this replica's part of the optimizer's state of what the replicas step in parts."""
        return self._optimizer

    def before_state_dict(self) -> None:
        """The optimizer's state is about to be read. Raises ConfigError when this replica has only a part of it."""
        self.settle()
        if self._optimizer is not None:
            self._optimizer.check_state_is_whole()

    def split_state(self) -> None:
        """Keeps this rank's part of a state that was loaded, or put together and changed, whole in the optimizer."""
        if self._optimizer is not None:
            self._optimizer.split_state()

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """See GradientSync."""
        for part in self._optimizer.parts if self._optimizer is not None else ():
            part.set_attributes(values)

    def check_trainable(self) -> None:
        """Raises ConfigError when a parameter is trained whose gradients nobody sums over the replicas."""
        with torch._C.DisableTorchFunctionSubclass():  # of parameters that wait for their update
            new = [
                name
                for name, parameter in self._cut.parameters.items()
                if parameter.requires_grad and parameter.numel() and id(parameter) not in self._summed
            ]
        if new:
            raise ConfigError(
                f"{new[0]} was frozen when the engine was built and is trained now: its gradients would not be "
                "summed over the replicas. Let it be trainable in the first step (it may be frozen later), give it "
                "to the Trainer's optimizer before that, or go on with a new Engine or Trainer after unfreezing"
            )

    # Inside

    def _sum_norm(self) -> Tensor:
        self._states.on(Event.MEASURE)
        if self._late is None:
            self._transfers.wait_reduced()
            self._tied.sum()
        else:
            self._late.sum()
        return self._agree(*self._measure(self.buckets, self._counts(self.buckets), self._groups.world))

    def _counts(self, buckets: Sequence[Bucket]) -> list[int]:
        """Returns what all ranks add up of a step beside its norm; see `_agree`."""
        unused = sum(not used for bucket in buckets for used in bucket.used)
        return [unused, self._buffers.changed(), self._requires_grad() != self._trained]

    def _measure(self, buckets: Sequence[Bucket], counts: list[int], world: WorldGroup) -> tuple[list[int], Tensor]:
        """Returns the sums of `counts` over all ranks, and the norm of the buckets' gradients, fp64; all ranks call."""
        primary, shares = self._cut.primary(), self._cut.shares
        whole = [b for b in buckets if self._kernels and all(p.name in primary - shares.keys() for p in b.pieces)]
        apart = [bucket for bucket in buckets if bucket not in whole]
        mine = [(p, b.gradients[p.start : p.stop]) for b in apart for p in b.pieces if p.name in primary]
        shards = [gradient for piece, gradient in mine if piece.name not in shares]
        shards += [bucket.gradients[bucket.shard] for bucket in whole]  # what pads them is zero
        weighted = [(gradient, piece.part_of(shares[piece.name])) for piece, gradient in mine if piece.name in shares]
        return gradients.all_reduce_norm(counts, shards, world, weighted, device=self._device, kernel=self._kernels)

    def _agree(self, counts: Sequence[int], norm: Tensor) -> Tensor:
        """Returns the norm as users see it, and acts on the sums of `_counts`."""
        total, changed, refrozen = counts
        self._buffers.agree(changed > 0)
        if refrozen:
            trained = self._requires_grad()
            names = {f"requires_grad of {name}": str(flag) for name, flag in trained.items()}
            compare(self._groups.world, {}, names)
            self._trained = trained
        if total:
            self._share_use()
        return norm.to(self._norm_dtype)

    def _requires_grad(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._cut.parameters.items()}

    def _is_stale(self, bucket: Bucket) -> bool:
        """Whether gradients that come now are of weights that are not up to date."""
        return self._readiness.is_closed(bucket)

    def _take_back(self) -> None:
        """Makes what `.grad` holds the step's gradients; copies of weights get those of the first that has one."""
        self._shown = [(parameter, parameter.grad) for bucket in self.buckets for parameter in bucket.parameters]
        for bucket in self.buckets:
            bucket.take_back()
        self._tied.share_first()

    def _touched(self) -> None:
        """Somebody reads or writes weights, or looks into the optimizer's state."""
        if not self._readiness.is_waiting:
            return
        if self._states.state is State.ACCUMULATING:  # in a forward; other transfers may be under way
            self.flush()
        else:
            self._read()

    def _open(self, bucket: Bucket) -> None:
        bucket.check_unwritten()
        self._transfers.wait_gathered(bucket)
        if self._optimizer is not None and self._optimizer.step_postponed(bucket) and not self._states.in_grad:
            bucket.clear()
        if self._states.has_gradients:
            bucket.attach()

    def _gather_gradients(self) -> None:
        for bucket in self.buckets:
            if bucket.number not in self._early:  # else it is on its way
                self._transfers.gather_gradients(bucket)
        for bucket in self.buckets:
            self._transfers.wait_gathered(bucket)

    def _share_use(self) -> None:
        """A parameter counts as used when any replica used it, and of those summed in a replica any place of it."""
        used = [used for bucket in self.buckets for used in bucket.used]
        flags = torch.tensor([self._buffers.changed(), *used], dtype=torch.uint8)
        self._groups.data.all_reduce(flags, torch.maximum)
        changed, *anywhere = flags.tolist()
        self._buffers.agree(bool(changed))
        values = iter(anywhere)
        for bucket in self.buckets:
            bucket.set_used([next(values) for _ in bucket.used])
        self._tied.share_use()

    # What others ask for

    def take_records(self) -> list[RawRecord]:
        """Returns the transfers and the waits since the last call, by chunk."""
        return self._transfers.take_records()

    @property
    def by_library(self) -> bool:
        """Whether a library's collectives carry the buckets, which all replicas of the stage move and time together."""
        return self._transfers.by_library

    def bandwidth(self, *, sustained: bool = False) -> float:
        """Returns the measured bytes per second that this rank sends; 0.0 when nothing was measured yet.

        Args:
            sustained: in the long run; else what it reached of late.
        """
        return self._transfers.bandwidth(sustained=sustained)

    def abort(self, reason: str) -> None:
        """Ends all communication; any thread."""
        self._transfers.abort(reason)

    def close(self) -> None:
        """Ends the threads and takes the hooks off the model."""
        self._states.on(Event.CLOSE)
        self._coat.close()
        self._transfers.close()
