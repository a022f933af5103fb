"""TrainingArguments: the stock arguments and how the model is spread over processes."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers

from fold3d.checkpoint import last_committed, manifest
from fold3d.comms.fresh_store import fresh_store
from fold3d.config import (
    AUTO,
    BLOCKS,
    CLIPPED_EACH_MICRO_BATCH,
    FP16_WITH_DELAY,
    SETTINGS,
    ParallelConfig,
    parse_tp_plan,
)
from fold3d.errors import ConfigError
from fold3d.faults.failure import launcher_keeps_store
from fold3d.faults.supervisor import watch_job
from fold3d.faults.uncaught import report_uncaught
from fold3d.plan.resolve import FOLLOWED, followed, programs_of, resolve_auto
from fold3d.topology import Topology
from fold3d.torch_private import changing_stores
from fold3d.trainer.other_device import other_device
from fold3d.trainer.reader import refuse_stock_trainer
from fold3d.trainer.refused import refuse_unsupported

if TYPE_CHECKING:
    from fold3d.engine.planning.mesh import Decision

    NumberOrAuto = int | str
    FlagOrAuto = bool | str
    Bytes = int | float | str
    Plan = Mapping[str, str] | str
else:  # HfArgumentParser reads the types, and would read `int | str` as int
    NumberOrAuto = FlagOrAuto = Bytes = Plan = str

logger = logging.getLogger(__name__)

RANDOM = "random"
"""`weights` that are drawn."""

# How launchers tell a process the size of its job; the same names, in the same order, that accelerate looks at.
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def of_config(name: str) -> Any:
    """Returns a field with default and help of the one of that name in ParallelConfig."""
    found = next(one for one in fields(ParallelConfig) if one.name == name)
    return field(default=found.default, metadata=dict(found.metadata))


@dataclass(repr=False)
class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments` and fold3d's settings: the layout, memory, communication and checkpoints.

    A micro-batch is `per_device_train_batch_size` samples, and an optimizer step has `gradient_accumulation_steps`
    micro-batches per replica: the stock Trainer's batch arithmetic with dp in the place of the number of processes.
    `global_batch_size` sets gradient_accumulation_steps. With parallel="auto" the Trainer's constructor chooses dp, tp,
    pp, per_device_train_batch_size and gradient_accumulation_steps, and writes them here.

    Every process makes its own, with the same values. As in the stock class, making it initialises torch's process
    group if there are several processes.

    Raises: ConfigError, before any process group is made, for values that cannot work, arguments without effect, and
        stock arguments that fold3d does not support (docs/compatibility.md).
    """

    parallel: str | None = of_config("parallel")
    global_batch_size: int | None = of_config("global_batch_size")
    strategy: str | None = of_config("strategy")
    dp: int | None = of_config("dp")
    tp: int = of_config("tp")
    tp_plan: Plan | None = of_config("tp_plan")
    tp_overlap: str = of_config("tp_overlap")
    sequence_parallel: FlagOrAuto = of_config("sequence_parallel")
    pp: int = of_config("pp")
    segments: NumberOrAuto = of_config("segments")
    schedule: str = of_config("schedule")
    micro_batch_size: NumberOrAuto | None = of_config("micro_batch_size")
    loss_reduction: str | None = of_config("loss_reduction")
    group_size: NumberOrAuto = of_config("group_size")
    dp_sync: str = of_config("dp_sync")
    dp_sync_dtype: str = of_config("dp_sync_dtype")
    gradient_delay: int = of_config("gradient_delay")
    flush: bool = of_config("flush")
    weight_versions: str = of_config("weight_versions")
    delay_correction: str = of_config("delay_correction")
    bucket_bytes: Bytes | None = of_config("bucket_bytes")
    memory_limit: Bytes | None = of_config("memory_limit")
    offload: str = of_config("offload")
    offload_pool: Bytes = of_config("offload_pool")
    offload_disk: str | None = of_config("offload_disk")
    offload_optimizer: bool = of_config("offload_optimizer")
    kernels: str = of_config("kernels")
    chunked_loss: int | None = of_config("chunked_loss")
    blocks: str = of_config("blocks")
    partition: str = of_config("partition")
    recompute: FlagOrAuto = of_config("recompute")
    retune: bool = of_config("retune")
    comm_timeout: float | None = of_config("comm_timeout")
    timeline: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer step (the first is 1) whose timeline is written to output_dir/timeline, as a picture "
            "and as a trace that Perfetto and chrome://tracing open. Default: none."
        },
    )
    weights: str | None = field(
        default=None,
        metadata={
            "help": "For a model built on the meta device: the folder with its safetensors, or random, which draws "
            "values from seed and parameter name. Default: the folder of from_pretrained under empty_weights, or the "
            "checkpoint that is resumed."
        },
    )

    async_save: bool = field(
        default=False,
        metadata={
            "help": "Whether a checkpoint is copied to host memory at the end of its step and written while training "
            "continues. Default: training waits until it is written."
        },
    )
    resume: str | None = field(
        default=None,
        metadata={
            "help": "'auto' resumes from the newest complete checkpoint in output_dir, if there is one and train() is "
            "given none. gradient_accumulation_steps then follows from the number of processes, so that the global "
            "batch stays that of the checkpoint. Default: train() starts anew unless it is given a checkpoint."
        },
    )
    preemption_grace: float | None = field(
        default=None,
        metadata={
            "help": "Seconds from the signal until the processes are killed, with enable_jit_checkpoint. A checkpoint "
            "that would not be complete by then, judging by the last one, is not started. Default: the limits of "
            "torchrun and Slurm."
        },
    )
    exit_when_preempted: bool = field(
        default=False,
        metadata={
            "help": "Whether train() ends the script, with exit code 0, when enable_jit_checkpoint has saved because "
            "of a signal. Default: it returns."
        },
    )

    def __post_init__(self) -> None:
        _report_uncaught()
        refuse_unsupported(self)
        self.segments, self.group_size = _number_or_auto(self.segments), _number_or_auto(self.group_size)
        if self.micro_batch_size is not None:
            self.micro_batch_size = _number_or_auto(self.micro_batch_size)
        self.tp_plan = parse_tp_plan("tp_plan", self.tp_plan)
        self.sequence_parallel = _flag_or_auto(self.sequence_parallel)
        m = self.gradient_accumulation_steps  # by its name here; it is the Engine's micro_batches
        if not isinstance(m, int) or isinstance(m, bool) or m < 1:
            raise ConfigError(f"gradient_accumulation_steps={m!r}: must be an integer of at least 1")
        self._follow_strategy()
        world_size = _announced_world_size()
        self._settle_batch(world_size)
        self._settle_saving(world_size)
        config = self.layout
        self._refuse_with_delay(config)
        for name in ("bucket_bytes", "memory_limit", "offload_pool", "recompute", "tp", "pp"):  # as they are understood
            setattr(self, name, getattr(config, name))
        if not isinstance(config.partition, str):
            self.partition = ",".join(config.partition)
        is_cut = config.is_open or self._check_mesh(config, world_size)
        if self.blocks != "auto" and not is_cut:
            raise ConfigError(
                f"blocks={self.blocks!r} has no effect with pp=1 and segments=1: the model is not cut; remove it"
            )
        if self.partition != BLOCKS and not is_cut:
            raise ConfigError(
                f"partition={self.partition!r} has no effect with pp=1 and segments=1: the model is not cut; remove it"
            )
        is_step = isinstance(self.timeline, int) and not isinstance(self.timeline, bool) and self.timeline >= 1
        if self.timeline is not None and not is_step:
            raise ConfigError(f"timeline={self.timeline!r}: must be an optimizer step, the first of which is 1")
        if self.timeline is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                f"timeline={self.timeline} draws a picture with matplotlib, which is not installed: "
                "pip install matplotlib, or remove timeline"
            )
        if self.timeline is not None and 0 < self.max_steps < self.timeline:
            raise ConfigError(f"timeline={self.timeline} has no effect: training ends after max_steps={self.max_steps}")
        if world_size > 1 and not torch.accelerator.is_available():
            self.use_cpu = True  # accelerate sees only one process on a machine without accelerator unless told so
        takes_other = world_size > 1 and not self.use_cpu
        with contextlib.ExitStack() as stack:
            if launcher_keeps_store():
                stack.enter_context(changing_stores(fresh_store))
            if takes_other:
                stack.enter_context(other_device(float(self.ddp_timeout)))
            super().__post_init__()  # type: ignore[no-untyped-call]
            found = self.world_size
        dp = found if config.is_open else config.resolve_dp(found)
        if dist.is_initialized():  # what follows may take each process another time: the data, the model, the Trainer
            pp, tp = (1, 1) if config.is_open else (self.pp, self.tp)
            watch_job(Topology(dp=dp, pp=pp, tp=tp, rank=dist.get_rank()), config.silence_seconds)
        if self.n_gpu > 1:
            raise ConfigError(
                f"one process sees {self.n_gpu} GPUs, which torch.nn.DataParallel would share; start one process "
                "per GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one of them"
            )

    def _check_mesh(self, config: ParallelConfig, world_size: int) -> bool:
        """Returns whether the model is cut. Raises: ConfigError for what does not go with the mesh."""
        dp = config.resolve_dp(world_size)
        constraints = resolve_auto(config, dp)
        if constraints.segments is not None and self.micro_batch_size != AUTO:  # raises when there is no such schedule
            parts = self._parts() * config.micro_batches
            programs_of(replace(config, micro_batches=parts), constraints, dp).compute(parts)
        if "underflow_overflow" in str(self.debug):
            self._run_all_modules(constraints.segments)
        return constraints.segments is None or constraints.segments * config.pp * config.tp > 1

    def _follow_strategy(self) -> None:
        """Takes over what `strategy` says. Raises: ConfigError for what contradicts it."""
        if self.strategy is not None:
            config = followed(self.layout)
            self.gradient_accumulation_steps = config.micro_batches
            for name in FOLLOWED:
                setattr(self, name, getattr(config, name))

    def _settle_batch(self, world_size: int) -> None:
        """Makes gradient_accumulation_steps follow from `global_batch_size`. Raises: ConfigError where it cannot."""
        samples, size = self.global_batch_size, self.per_device_train_batch_size
        if self._is_open:
            refused = {
                "auto_find_batch_size": self.auto_find_batch_size,
                "debug": "underflow_overflow" in str(self.debug),
                "schedule": self.schedule.endswith(".csv"),
                "gradient_accumulation_steps": self.gradient_accumulation_steps != 1,
            }
            for name in (name for name, is_set in refused.items() if is_set):
                raise ConfigError(
                    f'{name}={getattr(self, name)!r} is not available with parallel="auto", which decides the mesh and '
                    f"the micro-batches; remove it, or set dp, tp and pp"
                )
        if samples is None or self._is_open:
            return
        sizes = {name: 1 if getattr(self, name) is None else getattr(self, name) for name in ("tp", "pp")}
        dp = self.dp or world_size // (sizes["tp"] * sizes["pp"]) or 1
        if not isinstance(samples, int) or samples < 1 or samples % (size * dp):
            raise ConfigError(
                f"global_batch_size={samples!r} is no multiple of per_device_train_batch_size={size} times {dp} "
                "replicas; change one of them"
            )
        if self.gradient_accumulation_steps not in (1, samples // (size * dp)):
            raise ConfigError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} contradicts "
                f"global_batch_size={samples}, with which it is {samples // (size * dp)}; remove one of them"
            )
        self.gradient_accumulation_steps = samples // (size * dp)

    def settle(self, mesh: Decision) -> None:
        """Takes over what parallel="auto" has decided. Raises: ConfigError for what does not go with it."""
        self._mesh: Decision | None = mesh
        self.dp, self.tp, self.pp = mesh.dp, mesh.tp, mesh.pp
        self.per_device_train_batch_size, self.gradient_accumulation_steps = mesh.samples, mesh.micro_batches
        self._check_mesh(self.layout, mesh.world)

    def _settle_saving(self, world_size: int) -> None:
        """Raises: ConfigError for what has no effect, or no meaning, in saving and going on."""
        if self.resume not in (None, AUTO):
            raise ConfigError(
                f"resume={self.resume!r}: must be 'auto', or left out; give a folder to "
                "trainer.train(resume_from_checkpoint=...)"
            )
        if self.async_save and getattr(self.save_strategy, "value", self.save_strategy) == "no":
            raise ConfigError("async_save=True has no effect with save_strategy='no': set save_strategy, or remove it")
        if self.exit_when_preempted and not self.enable_jit_checkpoint:
            raise ConfigError(
                "exit_when_preempted=True has no effect without enable_jit_checkpoint=True, which saves at a signal"
            )
        grace = self.preemption_grace
        if grace is not None and (isinstance(grace, bool) or not isinstance(grace, (int, float)) or not grace > 0):
            raise ConfigError(f"preemption_grace={grace!r}: must be a number of seconds greater than 0")
        if grace is not None and not self.enable_jit_checkpoint:
            raise ConfigError(
                "preemption_grace has no effect without enable_jit_checkpoint=True, which saves at a signal"
            )
        if self.resume == AUTO:
            self._keep_global_batch(world_size)

    def _keep_global_batch(self, world_size: int) -> None:
        """Makes as many micro-batches of a step as give the global batch of the checkpoint that will be resumed.

        Raises: ConfigError when no number does.
        """
        last = None if self.output_dir is None else last_committed(self.output_dir)
        batch = None if last is None else manifest.said(last, "batch")
        if batch is None:
            return
        if self.global_batch_size is not None:
            if self.global_batch_size != batch:
                raise ConfigError(
                    f"{last} was trained with {batch} samples per step, and global_batch_size is "
                    f"{self.global_batch_size}: set it to {batch}, or leave out resume='auto' to change the batch"
                )
            return
        dp = self.layout.resolve_dp(world_size)
        size, before = self.per_device_train_batch_size, self.gradient_accumulation_steps
        if self.auto_find_batch_size and last is not None:  # the Trainer goes on with the size that was found
            size = manifest.said(last, "train_batch_size", manifest.TRAINER_STATE) or size
        samples = size * dp
        if batch % samples:
            raise ConfigError(
                f"{last} was trained with {batch} samples per step, which {dp} replicas with "
                f"per_device_train_batch_size={size} cannot make up: take another "
                "per_device_train_batch_size or number of processes, or leave out resume='auto' to change the batch"
            )
        self.gradient_accumulation_steps = batch // samples
        if self.gradient_accumulation_steps != before:
            logger.warning(
                "gradient_accumulation_steps=%s instead of %s, so that a step of %s replicas has the %s samples of %s",
                *(self.gradient_accumulation_steps, before, dp, batch, last),
            )

    def _run_all_modules(self, segments: int | None) -> None:
        """debug="underflow_overflow" reads what every module returns. Raises: ConfigError where no process runs all."""
        if self.pp * self.tp > 1 or segments not in (1, None):
            raise ConfigError(
                f"debug='underflow_overflow' is not available with pp={self.pp}, tp={self.tp} and "
                f"segments={self.segments}: it reads what every module returns, in a process that runs all of them; "
                "set all three to 1, or remove it"
            )
        self.segments = 1

    def _parts(self) -> int:
        """Returns into how many parts a micro-batch is divided."""
        size, samples = self.layout.part_size, self.per_device_train_batch_size
        if size is not None and samples % size:
            raise ConfigError(
                f"micro_batch_size={size} does not divide per_device_train_batch_size={samples}; take one of "
                f"{', '.join(str(one) for one in range(1, samples + 1) if samples % one == 0)}"
            )
        return 1 if size is None else samples // size

    def _refuse_with_delay(self, config: ParallelConfig) -> None:
        if config.gradient_delay and self.fp16:
            raise ConfigError(FP16_WITH_DELAY)
        if config.updates_each_micro_batch and self.max_grad_norm:
            raise ConfigError(CLIPPED_EACH_MICRO_BATCH)

    @property
    def mesh(self) -> Decision | None:
        """The choice of parallel="auto", once the Trainer has made it."""
        return vars(self).get("_mesh")

    @property
    def _is_open(self) -> bool:
        """Whether the Trainer is to decide the mesh: not of arguments that were written after it has."""
        sizes = (self.dp, self.tp, self.pp)
        made = self.per_device_train_batch_size * self.gradient_accumulation_steps * (self.dp or 0)
        is_settled = self.mesh is not None or (None not in sizes and made == self.global_batch_size)
        return self.parallel is not None and not is_settled

    @property
    def layout(self) -> ParallelConfig:
        """The layout as the Engine takes it. Raises: ConfigError for settings that cannot work."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS}
        if not self._is_open:
            shared |= {"parallel": None, "global_batch_size": None}  # gradient_accumulation_steps says it
        return ParallelConfig(
            **shared | {"tp_plan": parse_tp_plan("tp_plan", self.tp_plan)},
            micro_batches=self.gradient_accumulation_steps,
            seed=self.seed,
            patience=None if self.comm_timeout is not None else float(self.ddp_timeout),
        )

    @property
    def place_model_on_device(self) -> bool:
        """False: the Engine places the share of the model that this process holds.

        The stock constructor asks this before it touches the model. Raises: ConfigError there, unless the Trainer is
        fold3d's.
        """
        refuse_stock_trainer()
        return False


def _number_or_auto(value: int | str) -> int | str:
    """Returns the number that a command line gives as text; anything else as it is."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _flag_or_auto(value: bool | str) -> bool | str:
    """Returns the flag that a command line gives as text; anything else as it is."""
    flags = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    return flags.get(value.lower(), value) if isinstance(value, str) else value


def _report_uncaught() -> None:
    if _announced_world_size() > 1:
        rank = int(os.environ.get("RANK") or 0)
        report_uncaught(f"rank {rank}", rank)


def _announced_world_size() -> int:
    """Returns the number of processes in the job, before any process group exists."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    for name in _WORLD_SIZE_VARIABLES:
        if int(os.environ.get(name) or 0) > 0:
            return int(os.environ[name])
    return 1
