"""TrainingArguments: the stock arguments and how the model is spread over processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import transformers

from fold3d.config import AUTO, BLOCKS, FP16_WITH_DELAY, ParallelConfig, parse_tp_plan
from fold3d.errors import ConfigError
from fold3d.faults.job import watch_job
from fold3d.faults.uncaught import report_uncaught
from fold3d.plan.resolve import programs_of, resolve_auto
from fold3d.topology import Topology
from fold3d.trainer.other_device import other_device
from fold3d.trainer.reader import refuse_stock_trainer
from fold3d.trainer.refused import refuse_unsupported

if TYPE_CHECKING:
    NumberOrAuto = int | str
    FlagOrAuto = bool | str
    Bytes = int | float | str
    Plan = Mapping[str, str] | str
else:  # HfArgumentParser reads the types, and would read `int | str` as int
    NumberOrAuto = FlagOrAuto = Bytes = Plan = str

# How launchers tell a process the size of its job; the same names, in the same order, that accelerate looks at.
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(repr=False)
class TrainingArguments(transformers.TrainingArguments):
    """`transformers.TrainingArguments` with data-, tensor- and pipeline-parallel layout.

    A micro-batch is `per_device_train_batch_size` samples, an optimizer step has `gradient_accumulation_steps`
    micro-batches per replica: batch arithmetic is the stock Trainer's with dp in the place of the world size.

    Raises: ConfigError, before any process group is built, for values that cannot work, arguments that would have no
        effect, and stock arguments that fold3d does not carry out.
    """

    dp: int | None = field(
        default=None,
        metadata={"help": "Data-parallel replicas of the model. Default: number of processes / (tp * pp)."},
    )
    tp: int = field(
        default=1,
        metadata={
            "help": "Tensor-parallel processes: so many share each weight of a layer, and its computation; best on one "
            "host. How is found out by running the layers; `fold3d trace MODEL -t TP` shows it."
        },
    )
    tp_plan: Plan | None = field(
        default=None,
        metadata={
            "help": "Dict, as JSON on the command line, from module names or patterns to how their weights are spread, "
            "where that shall be otherwise than what is found out. Default: nothing is."
        },
    )
    tp_overlap: str = field(
        default=AUTO,
        metadata={
            "help": "How tensor-parallel communication is hidden: sub (two halves of a micro-batch take turns), fused "
            "(matrix products send one piece while they compute the next), none, or auto (the fastest, by "
            "prediction, and by real steps where that is close). The numbers are the same."
        },
    )
    sequence_parallel: FlagOrAuto = field(
        default=AUTO,
        metadata={
            "help": "Whether tensor-parallel processes share the sequence outside of layers that they share: norms, "
            "residual sums and dropout take 1 / tp of their memory. auto: where the model is found to allow it. The "
            "numbers are the same."
        },
    )
    pp: int = field(
        default=1,
        metadata={"help": "Pipeline stages: the model's layers are spread over so many processes."},
    )
    segments: NumberOrAuto = field(
        default=AUTO,
        metadata={
            "help": "Consecutive parts of the model, each cut into pp chunks, so that a process holds one chunk of "
            "each segment. More segments shorten the pipeline's idle time and let gradients travel earlier. auto: "
            "what is fastest by measured times of layers and network."
        },
    )
    schedule: str = field(
        default=AUTO,
        metadata={
            "help": "Order of the micro-batches: a name that `fold3d schedules` lists, the path of a CSV file, or auto."
        },
    )
    micro_batch_size: NumberOrAuto | None = field(
        default=None,
        metadata={
            "help": "Samples that pass the model at once; it divides per_device_train_batch_size, and so many parts of "
            "a micro-batch run after each other: less memory, with the gradients and the loss of the whole one. auto: "
            "under memory_limit what is fastest. Default: per_device_train_batch_size."
        },
    )
    loss_reduction: str | None = field(
        default=None,
        metadata={
            "help": "What a micro-batch's loss is of its samples', for micro_batch_size: sum, mean (over samples) or "
            "tokens (mean over labels that are not -100). Default: only losses that add up by construction are divided."
        },
    )
    group_size: NumberOrAuto = field(
        default=AUTO,
        metadata={
            "help": "Micro-batches that pass a segment before the next segment starts, or auto; only for schedules "
            "that use it (fold)."
        },
    )
    dp_sync: str = field(
        default="auto",
        metadata={
            "help": "How gradients are summed over the replicas, always exactly: zero1 (each process steps its share "
            "of the parameters: least memory), early (gradients travel whenever the network is idle: hides most), "
            "serial (nothing is hidden), auto."
        },
    )
    dp_sync_dtype: str = field(
        default="float32",
        metadata={
            "help": "How gradients travel to their sums over the replicas: float32, or bfloat16, which halves the "
            "bytes; they are kept and added in float32, but are rounded on their way."
        },
    )
    gradient_delay: int = field(
        default=0,
        metadata={
            "help": "1: each update takes the gradients of the step before, whose sums over the replicas have a "
            "whole step to travel: faster where the network is slow, but the weights are no more those of exact "
            "training. 0: those of its own step."
        },
    )
    bucket_bytes: Bytes | None = field(
        default=None,
        metadata={
            "help": "Layers' gradients are summed together until they have so many bytes, such as 4MiB. Default: the "
            "planner's choice, 1 MiB where there is none."
        },
    )
    memory_limit: Bytes | None = field(
        default=None,
        metadata={
            "help": "Bytes that a process may use for weights, gradients, optimizer state and activations, such as 8GB "
            "or 512MiB; the planner keeps its choice under it. Default: nine tenths of a GPU's memory, no limit on the "
            "CPU."
        },
    )
    offload: str = field(
        default=AUTO,
        metadata={
            "help": "What leaves the device between forward and backward, for a pool of host memory: none, boundaries "
            "(what recomputed layers keep), activations (all that backward passes need), either of a share of the "
            "micro-batches, such as activations:50%%, or auto: what is fastest under memory_limit, on a GPU or with "
            "offload_disk. Copies run beside the computation. The numbers are the "
            "same."
        },
    )
    offload_pool: Bytes = field(
        default=AUTO,
        metadata={
            "help": "Bytes of the pool of each process, such as 8GB, reserved before training; auto: what is planned, "
            "and what the first step asks for beyond."
        },
    )
    offload_disk: str | None = field(
        default=None,
        metadata={"help": "Folder for a file that is the pool, where host memory is short. Default: host memory."},
    )
    offload_optimizer: bool = field(
        default=False,
        metadata={
            "help": "Whether the optimizer's state lies in host memory and is stepped there: of this process's share "
            "with zero1, else of all its parameters. For any optimizer that torch can step on a CPU, layer by layer."
        },
    )
    kernels: str = field(
        default="torch",
        metadata={
            "help": "Whose kernels compute the gradient norm, step AdamW (with several replicas, or offload_optimizer) "
            "and put small stashes together: torch, or fold3d (one pass over the memory). The numbers differ in their "
            "last bits."
        },
    )
    blocks: str = field(
        default="auto",
        metadata={
            "help": "Name of the module list whose children are the model's blocks, e.g. transformer.h; 'auto' "
            "finds it."
        },
    )
    partition: str = field(
        default=BLOCKS,
        metadata={
            "help": "Between which modules the model may be cut: blocks; graph: any that few tensors leave, for models "
            "without a list of equal blocks (ResNets, U-Nets, Swin); or the names of the modules that run one after "
            "the other, with commas between."
        },
    )
    recompute: FlagOrAuto = field(
        default=AUTO,
        metadata={
            "help": "What is computed again in the backward pass instead of kept, for any model: none, full (whole "
            "chunks, of which only the inputs are kept; also as a bare flag), blocks (each block by itself), blocks:2 "
            "(every second one), or names of modules inside of a block, such as self_attn,mlp or attn.*; for each "
            "chunk another one with / between them; auto: the least with which memory_limit is kept. Blocks that "
            "activation_checkpointing=True makes recompute are left to themselves.",
            "nargs": "?",
            "const": "full",
        },
    )
    comm_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds a process waits for another before the job fails on every process; while a checkpoint "
            "is written, ddp_timeout counts instead. Default: ddp_timeout (1800) for one that gives signs of life, 300 "
            "for one that is silent."
        },
    )
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
            "help": "Folder with safetensors for a model built on the meta device. Default: weights drawn from seed "
            "and parameter name."
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
        config = self.parallel
        if config.gradient_delay and self.fp16:
            raise ConfigError(FP16_WITH_DELAY)
        for name in ("bucket_bytes", "memory_limit", "offload_pool", "recompute"):  # as they are understood
            setattr(self, name, getattr(config, name))
        if not isinstance(config.partition, str):
            self.partition = ",".join(config.partition)
        world_size = _announced_world_size()
        dp = config.resolve_dp(world_size)
        constraints = resolve_auto(config, dp)
        if constraints.segments is not None and self.micro_batch_size != AUTO:  # raises when there is no such schedule
            parts = self._parts() * config.micro_batches
            programs_of(replace(config, micro_batches=parts), constraints, dp).compute(parts)
        is_cut = constraints.segments is None or constraints.segments * config.pp * config.tp > 1
        if "underflow_overflow" in str(self.debug):
            self._run_all_modules(constraints.segments)
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
        with other_device(float(self.ddp_timeout)) if takes_other else contextlib.nullcontext():
            super().__post_init__()  # type: ignore[no-untyped-call]
            found = self.world_size
        dp = config.resolve_dp(found)
        if dist.is_initialized():  # what follows may take each process another time: the data, the model, the Trainer
            watch_job(Topology(dp=dp, pp=self.pp, tp=self.tp, rank=dist.get_rank()), config.silence_seconds)
        if self.n_gpu > 1:
            raise ConfigError(
                f"one process sees {self.n_gpu} GPUs, which torch.nn.DataParallel would share; start one process "
                "per GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one of them"
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
        size, samples = self.parallel.part_size, self.per_device_train_batch_size
        if size is not None and samples % size:
            raise ConfigError(
                f"micro_batch_size={size} does not divide per_device_train_batch_size={samples}; take one of "
                f"{', '.join(str(one) for one in range(1, samples + 1) if samples % one == 0)}"
            )
        return 1 if size is None else samples // size

    @property
    def parallel(self) -> ParallelConfig:
        """The layout, for the Engine."""
        return ParallelConfig(
            dp=self.dp,
            tp=self.tp,
            tp_plan=parse_tp_plan("tp_plan", self.tp_plan),
            tp_overlap=self.tp_overlap,
            sequence_parallel=self.sequence_parallel,
            pp=self.pp,
            segments=self.segments,
            micro_batches=self.gradient_accumulation_steps,
            micro_batch_size=self.micro_batch_size,
            loss_reduction=self.loss_reduction,
            schedule=self.schedule,
            group_size=self.group_size,
            dp_sync=self.dp_sync,
            dp_sync_dtype=self.dp_sync_dtype,
            gradient_delay=self.gradient_delay,
            bucket_bytes=self.bucket_bytes,
            memory_limit=self.memory_limit,
            offload=self.offload,
            offload_pool=self.offload_pool,
            offload_disk=self.offload_disk,
            offload_optimizer=self.offload_optimizer,
            kernels=self.kernels,
            blocks=self.blocks,
            partition=self.partition,
            recompute=self.recompute,
            seed=self.seed,
            comm_timeout=self.comm_timeout,
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
