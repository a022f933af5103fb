"""ParallelConfig: how one model is spread over processes. Pure data, checked when it is made."""

from __future__ import annotations

import json
import math
import operator
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fold3d.errors import ConfigError
from fold3d.offload import Offload
from fold3d.recompute import Recompute

AUTO = "auto"
BLOCKS = "blocks"
GRAPH = "graph"
Partition = str | Sequence[str]
"""Between which modules a model may be cut: BLOCKS, GRAPH, or the names of the modules."""
DEFAULT_COMM_TIMEOUT = 300.0
_MOST_SECONDS = 1e9
"""Some thirty years; clocks can still add it."""
_SEEDS = 1 << 63
"""Seeds that torch takes are below this, and not negative."""
DEFAULT_BUCKET_BYTES = 1 << 20
TP_WAYS = ("sub", "fused", "none")
"""Ways to run layers whose ranks communicate: in sub-micro-batches that take turns, with matrix products next to a
region's borders that communicate while they compute, or as they come."""
TRANSPORTS = ("auto", "tcp", "c10d")
DP_SYNC = ("zero1", "early", "serial")
"""Ways of DP.sync that can be asked for by name."""
SIMULATED_DP_SYNC = (*DP_SYNC, "blocking", "unvoted")
"""Those of the simulator: also two that fold3d does not train with, for comparison; csrc/core/sim/cluster_model.h."""
DP_SYNC_DTYPES = ("float32", "bfloat16")
DELAY_CORRECTIONS = ("none", "error_feedback", "predict")
WEIGHT_VERSIONS = ("2bw", "stashing", "vertical_sync")
"""Which weights a micro-batch takes without a flush; csrc/core/ir/versions.h."""
KERNELS = ("torch", "fold3d")
FP16_WITH_DELAY = (
    "gradient_delay=1 is not available with fp16: whether a step's gradients are finite is known a step later, when "
    "the loss of the next one has been scaled already; use bf16, or set gradient_delay=0"
)
CLIPPED_EACH_MICRO_BATCH = (
    "PipeDream's weight_versions update the last stage before the first one has its gradients, so that nobody knows "
    'the norm to clip by: leave max_grad_norm out (of the Trainer: max_grad_norm=0), or set weight_versions="2bw"'
)
_LEAST_MEMORY = 1_000
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for unit, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt")
}
_SIZE = re.compile(r"(?P<number>\d+(\.\d*)?(e\d+)?)\s*(?P<unit>[a-z]*)", re.ASCII | re.IGNORECASE)


REDUCTIONS = ("sum", "mean", "tokens")
"""How a loss can combine its samples' losses."""


def setting(default: Any, help: str, **more: Any) -> Any:
    """Returns a field that `TrainingArguments` has too; its command line says "process" for "rank".

    Args:
        help: text of the option.
        more: further metadata for HfArgumentParser.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a model is spread over dp * tp * pp processes and in which order its micro-batches are computed.

    Immutable, and the same on every rank. The Trainer makes it of its `TrainingArguments` (`args.layout`); in a loop of
    your own it is the argument of `Engine`.

    Raises: ConfigError for a value that cannot work, a setting without effect, and settings that exclude each other. It
        names the value, the reason and the setting to change. `Engine` checks what depends on the number of processes
        or on the model.
    """

    parallel: str | None = setting(
        None,
        "auto: choose dp, tp, pp and the micro-batches for global_batch_size samples at the start, from measured "
        "layers and links. dp, tp and pp that are set stay. Default: dp, tp and pp as they are set.",
    )
    """"auto": the engine chooses dp, tp, pp and the micro-batches when it is made: those with the shortest predicted
    step for `global_batch_size` samples, from measured layers and links and within the memory. dp, tp and pp that are
    set stay. `engine.config` then has the choice, and None here. None: dp, tp and pp are as set."""
    global_batch_size: int | None = setting(
        None,
        "Samples per optimizer step of all replicas; gradient_accumulation_steps follows. With parallel=auto a "
        "micro-batch has at most per_device_train_batch_size samples. Default: per_device_train_batch_size * "
        "gradient_accumulation_steps * dp.",
    )
    """Samples of an optimizer step, of all replicas together. Only with parallel="auto", which needs it. None: the
    batches decide."""
    strategy: str | None = setting(
        None,
        "Text that `fold3d plan` prints after 'strategy: ', or a file that has it. It sets the mesh, the "
        "micro-batches, the cut and all else that it names. Default: these are planned, or set one by one.",
    )
    """Text form of a `Strategy`, as `fold3d plan` prints it, or the path of a file that has it. It sets dp, tp, pp,
    micro_batches, the blocks of each chunk, the schedule and all else that it names. What is set besides must be the
    same. Nothing is planned then. None: the other settings decide."""
    dp: int | None = setting(
        None,
        "Data-parallel replicas of the model. Default: number of processes / (tp * pp).",
    )
    """Data-parallel replicas. None: number of processes / (tp * pp)."""
    tp: int = setting(
        None,
        "Tensor-parallel processes, which divide the weights and the computation of each layer; best within one host. "
        "`fold3d trace MODEL -t TP` shows how layers are divided. Default: 1, or what parallel=auto chooses.",
    )
    """Tensor-parallel ranks: so many ranks share each weight of a block, and its computation. fold3d finds out how by
    running the blocks; `fold3d trace MODEL -t TP` shows it. None: 1 (the attribute is 1 then), or the choice of
    parallel="auto"."""
    pp: int = setting(
        None,
        "Pipeline stages: the model's layers are divided over this many processes. Default: 1, or what parallel=auto "
        "chooses.",
    )
    """Pipeline stages. None: as for `tp`."""
    segments: int | str = setting(
        AUTO,
        "Consecutive parts of the model, each cut into pp chunks, so that a process holds one chunk of each segment. "
        "More segments shorten the pipeline bubble and let DP.sync start earlier. auto: the fastest by measured times "
        "of layers and network.",
    )
    """Consecutive parts of the model, each cut into pp chunks, so a rank holds `segments` chunks. "auto": the planner
    measures layers and network when the engine is built, and takes the number that its simulator finds fastest. It has
    no choice, and measures nothing for this, if dp * pp = 1 (1 segment) or the schedule has one number only."""
    micro_batches: int = 1
    """m: micro-batches per optimizer step and replica. `Engine.step` divides dimension 0 of the batch by it;
    `Engine.run` takes a list of micro-batches."""
    micro_batch_size: int | str | None = setting(
        None,
        "Splits each micro-batch into parts of this many samples that run one after another. Saves memory; loss and "
        "gradients do not change. Must divide per_device_train_batch_size. auto: the fastest size under memory_limit. "
        "Default: per_device_train_batch_size.",
    )
    """Most samples that pass through the model at once. Larger micro-batches are divided into parts of this size, and
    the schedule runs the parts: less memory and a shorter pipeline bubble, but more and smaller kernels. Gradients,
    loss and dropout masks are those of the undivided micro-batches. Refused where samples depend on each other (batch
    norm, losses that compare samples), and for a loss of which it is not known how it adds up (`loss_reduction`). None:
    micro-batches stay whole. "auto": under a `memory_limit` the planner's choice, together with `recompute`, `offload`
    and `segments`; otherwise None."""
    loss_reduction: str | None = setting(
        None,
        "How a micro-batch's loss combines its samples, for micro_batch_size: sum, mean (over samples) or tokens (mean "
        "over labels that are not -100). Default: only losses that are known to add up are split.",
    )
    """How a micro-batch's loss combines those of its samples, for `micro_batch_size`: "sum", "mean" (over samples) or
    "tokens" (mean over labels that are not -100). None: only a loss that is known to add up is divided, such as
    transformers' own loss functions that divide by the labels of the global batch."""
    schedule: str = setting(
        AUTO,
        "Order of the micro-batches: a name that `fold3d schedules` lists, the path of a CSV file, or auto.",
    )
    """Name of a schedule (`fold3d schedules` lists them), or path of a CSV file with compute actions. "auto": the
    planner's choice; where it does not run, "aiao" with several segments and "1f1b" with one."""
    group_size: int | str = setting(
        AUTO,
        "Micro-batches that pass a segment before the next segment starts, or auto; only for schedules that use it "
        "(fold; kfkb, where it is k).",
    )
    """N: micro-batches that pass a segment before the next segment starts; of kfkb, k. Only for schedules that use it.
    "auto": the planner's choice; where it does not run, the schedule's default."""
    tp_plan: Mapping[str, str] | None = setting(
        None,
        "Overrides how weights are divided: a dict (JSON on the command line) from module names or patterns to "
        "colwise, rowwise or replicate. Default: no overrides.",
    )
    """Overrides how weights are divided: module names or patterns -> "replicate", "colwise" or "rowwise", see
    docs/tensor-parallel.md. None: no overrides."""
    blocks: str = setting(
        "auto",
        "Name of the module list whose children are the model's blocks, e.g. transformer.h; 'auto' finds it.",
    )
    """Name of the ModuleList or Sequential whose children are the model's blocks. "auto" finds it."""
    partition: Partition = setting(
        BLOCKS,
        "Where the model may be cut: between blocks; graph: after modules with few outputs, for models without a list "
        "of equal blocks (ResNets, U-Nets, Swin); or names of modules that run one after another, separated by "
        "commas.",
    )
    """Between which modules the model may be cut. "blocks": between blocks. "graph": after any module that few tensors
    leave, found in a recording, for models without a list of equal blocks (ResNets, U-Nets, Swin). Or the names of
    modules that run one after another, as a sequence or separated by commas."""
    recompute: bool | str = setting(
        AUTO,
        "What to recompute in the backward pass: none, full (whole chunks; also as a bare flag), blocks (each block), "
        "blocks:2 (every second block), or names of modules inside a block, such as self_attn,mlp or attn.*; one value "
        "per chunk, separated by /. auto: as little as memory_limit allows. Blocks under activation_checkpointing=True "
        "are left alone.",
        nargs="?",
        const="full",
    )
    """What the backward pass computes again instead of keeping it. "none". "full": whole chunks, of which only the
    inputs are kept. "blocks": each block. "blocks:2": every second block. Or names of modules inside a block, or
    patterns: "self_attn,mlp", "attn.*". Values for single chunks are separated by "/". True means "full" and False
    "none"; the attribute is text then. "auto": under a `memory_limit` the least that keeps it; otherwise nothing. The
    numbers do not change."""
    tp_overlap: str = setting(
        AUTO,
        "How TP.sync is hidden: sub (two halves of a micro-batch take turns), fused (matrix products send one piece "
        "while they compute the next), none, or auto (the fastest by prediction, and by real steps if predictions are "
        "close). The numbers do not change.",
    )
    """How TP.sync is hidden. "sub": two halves of every micro-batch take turns, one computes while the other
    communicates. "fused": matrix products next to a sum send one piece while they compute the next. "none": every sum
    is waited for. "auto": "sub" and "none" are predicted from measured times; if the predictions are close, all three
    run for three steps each, and the fastest stays. The numbers do not change."""
    sequence_parallel: bool | str = setting(
        AUTO,
        "Whether tensor-parallel processes divide the sequence outside of divided layers: norms, residual sums and "
        "dropout take 1 / tp of their memory. auto: if the model allows it. The numbers do not change.",
    )
    """Whether the ranks of a tensor-parallel group also share the sequence where they do not share weights: norms,
    residual sums and dropout then work on 1 / tp of the tokens, which takes 1 / tp of their memory and sends as many
    bytes. "auto": if the model allows it. The numbers do not change."""
    seed: int = 0
    """Seed of dropout masks, and of the initial weights of models built on the meta device. An integer from 0 to 2**63
    - 1."""
    comm_timeout: float | None = setting(
        None,
        "Seconds that a process waits for another before the job fails on every process. While a checkpoint is "
        "written, ddp_timeout counts instead. Default: ddp_timeout (1800) if the other shows signs of life, else 300.",
    )
    """Seconds that a rank waits for another before the step fails on every rank. None: 300."""
    patience: float | None = None
    """Seconds that a rank waits for one that shows signs of life but is busy, such as writing a file alone. A rank
    without signs of life has failed after `comm_timeout`. None: comm_timeout."""

    transport: str = "auto"
    """What sends activations and gradients: "tcp" (fold3d's own connections, from host memory), "c10d" (torch's process
    groups, gloo or NCCL), or "auto": tcp for parameters on the CPU, otherwise c10d."""

    dp_sync: str = setting(
        AUTO,
        "How gradients are summed over the replicas, always exactly: zero1 (each process steps its share of the "
        "parameters; least memory), early (all-gathers gradients whenever the network is idle; hides most), serial "
        "(hides nothing), auto.",
    )
    """How gradients are summed over the replicas. All ways give the same bits. "zero1" (ZeRO-1, Rajbhandari et al.
    2020): each replica steps its share of the parameters and gathers the others under the next forward; takes 1/dp of
    the optimizer's memory. "early": gradients are gathered whenever the network is idle, and each replica steps all
    parameters; hides more. "serial": hides nothing, for comparison. "auto": the planner's choice for each bucket where
    it runs (segments="auto", or a memory limit), otherwise early."""
    dp_sync_dtype: str = setting(
        "float32",
        "Dtype in which gradients are sent to other replicas: float32, or bfloat16, which halves the bytes. They are "
        "accumulated and added in float32, but rounded when sent.",
    )
    """Dtype in which gradients are sent to their sums over the replicas: "float32", or "bfloat16", which halves the
    bytes. Gradients are accumulated over micro-batches, and added, in float32. With bfloat16 and dp replicas a sum is
    rounded dp times on its way, so the numbers are no longer those of one process."""
    gradient_delay: int = setting(
        0,
        "1: each update applies the gradients of the step before, so that DP.sync has a full step. Faster on slow "
        "networks, but no longer the weights of exact training. 0: the gradients of its own step.",
    )
    """1: the optimizer applies the gradients of the step before, so that a whole step hides their sums. The weights are
    no longer those of exact training, see docs/late-gradients.md. 0: the gradients of the step itself."""
    flush: bool = setting(
        True,
        "Whether the pipeline drains between optimizer steps. False (PipeDream-2BW) needs gradient_delay=1, schedule "
        "1f1b, one segment and the CPU, and keeps a second version of the weights.",
    )
    """Whether the pipeline runs empty between optimizer steps. False (PipeDream-2BW, Narayanan et al. 2021) is faster
    with few micro-batches and keeps two versions of the weights; these are, bit for bit, those of `gradient_delay=1`,
    which it needs. It also needs the schedule "1f1b", one segment, at least as many micro-batches as stages, and the
    CPU. See docs/late-gradients.md."""
    weight_versions: str = setting(
        "2bw",
        "Which weights a micro-batch uses with flush=False: 2bw (two versions, an update per step), or PipeDream's, "
        "with an update per micro-batch and as many versions as stages: stashing (each stage its newest), "
        "vertical_sync (the same on all stages).",
    )
    """Which weights a micro-batch uses with `flush=False`. "2bw": two versions, an update per step. "stashing" and
    "vertical_sync" (PipeDream, Narayanan et al. 2019): an update per micro-batch, so micro_batches=1. With "stashing" a
    micro-batch uses the newest weights of each stage; with "vertical_sync" on all stages those with the updates of the
    micro-batches up to pp before it. Both passes use the same weights, and a stage keeps up to pp versions. See
    docs/late-gradients.md."""
    delay_correction: str = setting(
        "none",
        "Correction for gradient_delay=1: none; error_feedback (twice the optimizer's update, less the one of the step "
        "before); predict (gradients at the weights that the next update would give).",
    )
    """Correction for `gradient_delay=1`. "error_feedback": subtracts twice the optimizer's update, less the update of
    the step before; takes one more state of the optimizer. "predict": computes gradients at the weights that the last
    update, applied once more, would give; takes one more copy of the weights. "none". See docs/late-gradients.md."""
    bucket_bytes: int | float | str | None = setting(
        None,
        "Least bytes of a bucket of gradients, such as 4MiB; 0: a bucket per layer. Default: the planner's choice, "
        "else 1 MiB.",
    )
    """Gradients of neighbouring layers are summed together until they have so many bytes; 0: each layer's alone. Also
    as text, "4MiB"; the attribute is a number then. None: the planner's choice, or 1 MiB."""
    memory_limit: int | float | str | None = setting(
        None,
        "Bytes that a process may use for weights, gradients, optimizer state and activations, such as 8GB or "
        "512MiB; the planner keeps below it. Default: nine tenths of a GPU's memory, no limit on the CPU.",
    )
    """Bytes that a rank may use for weights, gradients, optimizer state and activations. Also as text, "8GB" (8e9) or
    "512MiB" (512 * 2**20); the attribute is a number then. With a limit the planner runs even if `segments` is set, and
    looks for a schedule with fewer micro-batches in flight, zero1 for as many buckets as needed, and the least
    `recompute` and `offload`. If nothing fits, building the engine raises ConfigError. None: no limit on the CPU; on a
    GPU nine tenths of its memory where the planner runs, and if nothing fits, the plan that needs least."""
    offload: str = setting(
        AUTO,
        "Activations to move to host memory between forward and backward: none, boundaries (what recomputed layers "
        "keep), activations (all that backward passes need), both also for a share of the micro-batches, such as "
        "activations:50%%, or auto: the fastest under memory_limit, on a GPU or with offload_disk. Copies run beside "
        "the computation. The numbers do not change.",
    )
    """What leaves the device between its forward and its backward, for a pool in host memory. "none". "boundaries": the
    inputs that recomputed chunks and blocks keep. "activations": everything that the autograd graphs of all chunks
    saved. Copies run beside the computation, and what is used again at once stays. "activations:50%": of half of the
    micro-batches, if copies of all would take longer than what hides them. "auto": under a `memory_limit`, on a GPU or
    with `offload_disk`, if it is faster than `recompute`; otherwise nothing. The numbers do not change."""
    offload_pool: int | float | str = setting(
        AUTO,
        "Bytes of each process's pool for offload, such as 8GB, reserved before training. auto: as planned, and more "
        "if the first step needs it.",
    )
    """Bytes of a rank's pool, reserved when the engine is built (pinned on GPUs). Also as text, "8GB"; the attribute is
    a number then. If the pool is too small, an error says so, before training where the schedule proves it. "auto": as
    planned, and more if the stashes of the first step need it."""
    offload_disk: str | None = setting(
        None,
        "Folder of a file that serves as the pool, if host memory is short. Default: the pool is host memory.",
    )
    """Folder of a file that serves as the pool, for hosts with little memory. The file has no name and is gone with the
    process. None: the pool is host memory."""
    offload_optimizer: bool = setting(
        False,
        "Whether the optimizer state lies in host memory and is stepped there: with zero1 of this process's share, "
        "else of all its parameters. Works with any optimizer that torch can step on a CPU, layer by layer.",
    )
    """Whether the optimizer's state (moments, and master weights that the optimizer keeps) lies in host memory and the
    same optimizer steps there (ZeRO-Offload, Ren et al. 2021): this rank's share with zero1, otherwise all its
    parameters. Gradients and weights are copied to the host, and weights back. On a CPU the numbers do not change; on a
    GPU their last bits differ."""
    kernels: str = setting(
        "torch",
        "Whose kernels compute the gradient norm, step AdamW (with several replicas, or offload_optimizer) and put "
        "small stashes together: torch, or fold3d (one pass over the memory). The numbers differ in their last bits.",
    )
    """Whose kernels compute the gradient norm, step AdamW (with several replicas, or offload_optimizer) and copy small
    stashes together: "torch", or "fold3d", which goes through the memory once where torch does several times. The
    numbers differ in their last bits. The default is torch's because no GPU has shown a gain yet: measure with `make
    gpu`."""
    chunked_loss: int | None = setting(
        None,
        "Computes a language model's cross-entropy in chunks of this many tokens, in the forward and again in the "
        "backward. Saves the memory of all logits; costs one more product with the head. Default: all tokens at once.",
    )
    """Computes the cross-entropy of a language model in chunks of so many tokens, in the forward and again in the
    backward; with tp, each rank its part of the vocabulary. Only the logits of one chunk exist at a time, at the cost
    of one more product with the output head. A loss that reads logits in another way gets all of them, and the log says
    so. None: all tokens at once."""
    retune: bool = setting(
        True,
        "Whether the order of micro-batches (schedule, group_size), the order of gathers and, with "
        "micro_batch_size=auto, how many samples pass the model at once may change while training goes on, as measured "
        "times of layers and links ask for; a line says so. The numbers are the same. False: what was decided stays.",
    )
    """Whether the planner may change its choice while training goes on, by measured times of layers and links: the
    schedule and N, the order of gathers, and with micro_batch_size="auto" how many samples pass through the model at
    once. Weights stay where they are, and the numbers do not change. False: the first choice stays."""
    preempt: bool = True
    """Whether activations go before gradients on the network. False: first come, first served, for comparison."""

    def __post_init__(self) -> None:
        self._check_parallel()
        self._check_counts()
        self._check_parts()
        self._check_tp()
        self._check_words()
        if self.recompute != AUTO:
            object.__setattr__(self, "recompute", str(Recompute.parse(self.recompute)))
        for name, least in (("bucket_bytes", 0), ("memory_limit", 1)):
            object.__setattr__(self, name, parse_bytes(name, getattr(self, name), least))
        check_memory("memory_limit", self.memory_size)
        self._check_offload()
        self._check_flags()
        object.__setattr__(self, "seed", _seed(self.seed))
        self._check_seconds()
        self._check_blocks()

    def _check_parallel(self) -> None:
        if self.parallel not in (None, AUTO):
            raise ConfigError(f'parallel={self.parallel!r}: must be "{AUTO}" or None')
        if self.strategy is not None and (self.parallel is not None or not isinstance(self.strategy, str)):
            raise ConfigError(
                f"strategy={self.strategy!r} with parallel={self.parallel!r}: a strategy is text that says the mesh; "
                "leave one of them out"
            )
        if self.parallel is None:
            for name in ("tp", "pp") if self.strategy is None else ():
                object.__setattr__(self, name, 1 if getattr(self, name) is None else getattr(self, name))
            if self.global_batch_size is not None:
                raise ConfigError(
                    f"global_batch_size={self.global_batch_size!r} has no effect on an engine whose micro_batches are "
                    'set; remove it, or set parallel="auto"'
                )
            return
        if self.global_batch_size is None:
            raise ConfigError('parallel="auto" decides for a number of samples per step: set global_batch_size')
        if self.micro_batches != 1:
            raise ConfigError(
                f'micro_batches={self.micro_batches!r} follows from global_batch_size with parallel="auto"; remove it'
            )
        if self.micro_batch_size is not None:
            raise ConfigError(
                f'micro_batch_size={self.micro_batch_size!r} has no effect with parallel="auto", which decides how '
                "many samples pass the model at once; remove it"
            )

    @property
    def is_open(self) -> bool:
        """Whether the mesh is to be decided (`parallel="auto"`): `tp` and `pp` may be None as long as it is."""
        return self.parallel is not None

    @property
    def _may_lack_mesh(self) -> bool:
        """Whether `tp` and `pp` may be None: also until a strategy is followed (`plan.resolve.followed`)."""
        return self.is_open or self.strategy is not None

    def decided(self, *, dp: int, tp: int, pp: int, micro_batches: int) -> ParallelConfig:
        """Returns the layout with this mesh. Raises: ConfigError where a setting does not go with it."""
        return replace(self, parallel=None, global_batch_size=None, dp=dp, tp=tp, pp=pp, micro_batches=micro_batches)

    def _check_counts(self) -> None:
        for name in (
            *("dp", "tp", "pp", "segments", "micro_batches", "micro_batch_size", "group_size", "chunked_loss"),
            "global_batch_size",
        ):
            value = getattr(self, name)
            none = (
                "dp",
                "micro_batch_size",
                "chunked_loss",
                "global_batch_size",
                *(("tp", "pp") if self._may_lack_mesh else ()),
            )
            if (value is None and name in none) or (
                value == AUTO and name in ("segments", "micro_batch_size", "group_size")
            ):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                auto = ' or "auto"' if name in ("segments", "micro_batch_size", "group_size") else ""
                raise ConfigError(f"{name}={value!r}: must be an integer of at least 1{auto}")

    def _check_parts(self) -> None:
        divides = self.micro_batch_size is not None
        if self.loss_reduction is not None and self.loss_reduction not in REDUCTIONS:
            raise ConfigError(
                f"loss_reduction={self.loss_reduction!r}: must be one of {', '.join(REDUCTIONS)}, or None"
            )
        if self.loss_reduction is not None and not divides:
            raise ConfigError(
                f"loss_reduction={self.loss_reduction!r} has no effect: it says how losses of parts of a micro-batch "
                "add up; set micro_batch_size, or remove it"
            )
        if self._may_lack_mesh:
            return
        if isinstance(self.group_size, int) and self.group_size > self.micro_batches and not divides:
            raise ConfigError(
                f"group_size={self.group_size} is more than micro_batches={self.micro_batches} (of the Trainer: "
                "gradient_accumulation_steps) and would act like it; lower group_size, or leave it out"
            )

    def _check_tp(self) -> None:
        self._check_tp_plan()
        if self.tp_overlap not in (AUTO, *TP_WAYS):
            raise ConfigError(f"tp_overlap={self.tp_overlap!r}: must be one of {', '.join((AUTO, *TP_WAYS))}")
        if self.tp_overlap != AUTO and self.tp == 1:
            raise ConfigError(f"tp_overlap={self.tp_overlap!r} has no effect with tp=1; remove it, or raise tp")
        if not isinstance(self.sequence_parallel, bool) and self.sequence_parallel != AUTO:
            raise ConfigError(f'sequence_parallel={self.sequence_parallel!r}: must be True, False or "auto"')
        if self.sequence_parallel is True and self.tp == 1:
            raise ConfigError("sequence_parallel=True has no effect with tp=1; remove it, or raise tp")

    def _check_words(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport={self.transport!r}: must be one of {', '.join(TRANSPORTS)}")
        if not isinstance(self.schedule, str) or not self.schedule:
            raise ConfigError(f'schedule={self.schedule!r}: must be a name, the path of a CSV file, or "auto"')
        if self.dp_sync not in (AUTO, *DP_SYNC):
            raise ConfigError(f"dp_sync={self.dp_sync!r}: must be one of {', '.join((AUTO, *DP_SYNC))}")
        for name, known in (
            ("dp_sync_dtype", DP_SYNC_DTYPES),
            ("kernels", KERNELS),
            ("delay_correction", DELAY_CORRECTIONS),
            ("weight_versions", WEIGHT_VERSIONS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}")
        if self.gradient_delay not in (0, 1) or isinstance(self.gradient_delay, bool):
            raise ConfigError(f"gradient_delay={self.gradient_delay!r}: must be 0, or 1 for gradients of a step before")
        if self.gradient_delay and self.dp_sync == "serial":
            raise ConfigError(
                'gradient_delay=1 hides the sums of gradients under a whole step, and dp_sync="serial" hides nothing; '
                'set dp_sync="auto", or gradient_delay=0'
            )

    def _check_flags(self) -> None:
        for name in ("preempt", "offload_optimizer", "flush", "retune"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be True or False")
        # What a strategy says of it is known when it is followed.
        if self.delay_correction != "none" and not self.gradient_delay and self.strategy is None:
            raise ConfigError(
                f"delay_correction={self.delay_correction!r} has no effect with gradient_delay=0; set "
                "gradient_delay=1, or remove it"
            )
        if self.delay_correction == "predict" and self.offload_optimizer:
            raise ConfigError(
                'delay_correction="predict" is not available with offload_optimizer=True; set it to False, or '
                'delay_correction="error_feedback"'
            )
        if not self.flush:
            if self.tp is not None and self.pp is not None:
                self._check_without_flush()
        elif self.weight_versions != "2bw":
            raise ConfigError(
                f"weight_versions={self.weight_versions!r} has no effect with a flush; set flush=False, or remove it"
            )

    @property
    def given_segments(self) -> int | None:
        """The number of segments that the user has set; None where it is the planner's choice."""
        return self.segments if isinstance(self.segments, int) else None

    @property
    def updates_each_micro_batch(self) -> bool:
        """Whether PipeDream's versions of weights are asked for."""
        return self.weight_versions != "2bw"

    def _check_without_flush(self) -> None:
        for name, only in (("schedule", "1f1b"), ("segments", 1)):
            if getattr(self, name) == AUTO:
                object.__setattr__(self, name, only)
        needed: dict[str, tuple[Any, ...]] = {
            "gradient_delay": (1,),
            "schedule": ("1f1b",),
            "segments": (1,),
            "tp": (1,),
            "micro_batch_size": (None,),
            "memory_limit": (None,),
            "offload": (AUTO, "none"),
            "offload_optimizer": (False,),
        }
        for name, values in needed.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"flush=False is not available with {name}={getattr(self, name)!r}; set {name}={values[0]!r}, or "
                    "flush=True"
                )
        if self.pp < 2:
            raise ConfigError("flush=False has no effect with pp=1: there is no pipeline; set pp, or flush=True")
        if self.recompute != AUTO and any(choice.full for choice in Recompute.parse(self.recompute).choices):
            raise ConfigError(
                f'flush=False is not available with recompute={self.recompute!r}; set recompute="blocks", or flush=True'
            )
        if self.delay_correction == "predict" or (self.delay_correction != "none" and self.updates_each_micro_batch):
            raise ConfigError(
                f"delay_correction={self.delay_correction!r} is not available with flush=False and "
                f'weight_versions={self.weight_versions!r}; set delay_correction="none", or flush=True'
            )
        if self.updates_each_micro_batch:
            if self.micro_batches != 1:
                raise ConfigError(
                    f"weight_versions={self.weight_versions!r} updates weights after each micro-batch, and "
                    f"micro_batches (of the Trainer: gradient_accumulation_steps) is {self.micro_batches}; set it to 1"
                )
            return
        if self.micro_batches < self.pp:
            raise ConfigError(
                f"flush=False needs at least as many micro-batches as stages, here {self.pp}, and micro_batches (of "
                f"the Trainer: gradient_accumulation_steps) is {self.micro_batches}; raise it, or set flush=True"
            )

    def _check_seconds(self) -> None:
        for name in ("comm_timeout", "patience"):
            seconds = getattr(self, name)
            is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
            if seconds is not None and not (is_number and 0 < seconds <= _MOST_SECONDS):
                raise ConfigError(
                    f"{name}={seconds!r}: must be a positive number of seconds, {_MOST_SECONDS:g} at most"
                )

    def _check_blocks(self) -> None:
        if not isinstance(self.blocks, str) or not self.blocks:
            raise ConfigError(
                f'blocks={self.blocks!r}: must be the name of the ModuleList that holds the blocks, or "{AUTO}"'
            )
        object.__setattr__(self, "partition", parse_partition("partition", self.partition))
        if self.blocks != AUTO and self.partition != BLOCKS:
            raise ConfigError(
                f"blocks={self.blocks!r} has no effect with partition={self.partition!r}, which says by itself between "
                "which modules to cut; remove one of them"
            )
        if self.partition == GRAPH and (self.tp or 1) > 1:
            raise ConfigError(
                f'partition="graph" cuts models that have no list of equal blocks, and tp={self.tp} divides equal '
                'blocks; set tp=1, or partition="blocks"'
            )

    def _check_tp_plan(self) -> None:
        plan = self.tp_plan
        if plan is None:
            return
        if not isinstance(plan, Mapping) or not all(isinstance(word, str) for both in plan.items() for word in both):
            raise ConfigError(f"tp_plan={plan!r}: must be a dict from module names or patterns to how they are spread")
        if self.tp == 1:
            raise ConfigError(f"tp_plan={plan!r} has no effect with tp=1; remove it, or raise tp")

    def _check_offload(self) -> None:
        if self.offload != AUTO:
            object.__setattr__(self, "offload", str(Offload.parse(self.offload)))
        if self.offload_pool != AUTO:
            size = parse_bytes("offload_pool", self.offload_pool, 1, otherwise=f'"{AUTO}"')
            object.__setattr__(self, "offload_pool", size)
        for name, value in self.of_pool().items() if self.offload == "none" else ():
            raise ConfigError(f'{name}={value!r} has no effect with offload="none"; remove one of them')
        if self.offload_disk is not None and not isinstance(self.offload_disk, str):
            raise ConfigError(f"offload_disk={self.offload_disk!r}: must be the name of a folder, or None")

    def of_pool(self) -> dict[str, object]:
        """Returns what the user has said of the pool, by the names of the settings."""
        said = {"offload_pool": (self.offload_pool, AUTO), "offload_disk": (self.offload_disk, None)}
        return {name: value for name, (value, default) in said.items() if value != default}

    @property
    def pool_size(self) -> int | None:
        """`offload_pool`, a number; None where it is "auto"."""
        return self.offload_pool if isinstance(self.offload_pool, int) else None

    @property
    def part_size(self) -> int | None:
        """`micro_batch_size`, a number; None where micro-batches stay whole, or it is not known yet."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None

    @property
    def recomputes(self) -> bool:
        """Whether the user has asked for anything to be computed again."""
        return self.recompute != AUTO and not Recompute.parse(self.recompute).nothing

    @property
    def memory_size(self) -> int | None:
        """`memory_limit`, a number."""
        assert self.memory_limit is None or isinstance(self.memory_limit, int)
        return self.memory_limit

    @property
    def timeout_seconds(self) -> float:
        """Seconds that a rank waits in an exchange."""
        return self.silence_seconds if self.patience is None else float(self.patience)

    @property
    def silence_seconds(self) -> float:
        """Seconds until a rank that gives no sign of life has failed."""
        return DEFAULT_COMM_TIMEOUT if self.comm_timeout is None else float(self.comm_timeout)

    def resolve_dp(self, world_size: int) -> int:
        """Returns the number of replicas in a job of `world_size` processes.

        Raises: ConfigError unless dp * tp * pp == world_size.
        """
        cells = self.tp * self.pp
        dp = self.dp if self.dp is not None else world_size // cells
        if dp * cells != world_size or dp < 1:
            wanted = dp * cells if self.dp is not None else cells * -(-world_size // cells)
            alone = f"pp={self.pp}" if self.tp == 1 else f"tp*pp = {self.tp}*{self.pp} = {cells}"
            asked = f"dp*tp*pp = {dp}*{self.tp}*{self.pp} = {wanted}" if self.dp is not None else alone
            sizes = "dp or pp" if self.tp == 1 else "dp, tp or pp"
            needs = "" if self.dp is not None else f" needs {cells} processes, or a multiple of them"
            how = f"start it with {_torchrun(wanted)}" if world_size == 1 else f"start {wanted} processes with torchrun"
            raise ConfigError(f"{asked}{needs}, but the job has {world_size} process(es); {how}, or change {sizes}")
        if dp == 1:
            given = {"dp_sync": self.dp_sync != AUTO, "bucket_bytes": self.bucket_bytes is not None}
            given["dp_sync_dtype"] = self.dp_sync_dtype != "float32"
            given["preempt"] = not self.preempt
            for name in (name for name, is_given in given.items() if is_given):
                raise ConfigError(f"{name}={getattr(self, name)!r} has no effect with one replica; remove it")
        if dp > 1 and self.updates_each_micro_batch:
            raise ConfigError(
                f"weight_versions={self.weight_versions!r} is not available with dp={dp}: sums over the replicas would "
                f'have no time to be summed between two updates; start {cells} processes, or set weight_versions="2bw"'
            )
        return dp


SETTINGS = tuple(one.name for one in fields(ParallelConfig) if "help" in one.metadata)
"""Names of the settings that `TrainingArguments` has too."""


def parse_bytes(name: str, value: object, least: int = 0, *, otherwise: str = "None") -> int | None:
    """Returns a setting in bytes: a whole number, or text such as "8GB" and "512MiB"; None stays None.

    Args:
        otherwise: what else the setting may be, in words for the error.
    Raises: ConfigError, naming the setting and the forms, for anything else and for less than `least`.
    """
    if value is None:
        return None
    size: int | float | None = None
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        unit = _UNITS.get(match["unit"].lower())
        size = None if unit is None else float(match["number"]) * unit
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        size = value
    if size is None or not least <= size < 2**63 or size != int(size):
        kind = "a positive number of bytes" if least else "a number of bytes, 0 for a bucket per layer"
        raise ConfigError(f'{name}={value!r}: must be {kind}, such as 8000000000, 8e9, "8GB", "512MiB", or {otherwise}')
    return int(size)


def check_memory(name: str, size: int | None) -> None:
    """Raises ConfigError for a process's memory in bytes that is a number without its unit: less than 1 kB."""
    if size is not None and size < _LEAST_MEMORY:
        raise ConfigError(f'{name}={size}: no process fits into {size} bytes; did you mean "{size}GB"?')


def _seed(value: Any) -> int:
    try:
        seed = operator.index(value)
    except TypeError:
        seed = -1
    if isinstance(value, bool) or not 0 <= seed < _SEEDS:
        raise ConfigError(f"seed={value!r}: must be an integer from 0 to {_SEEDS - 1}")
    return seed


def parse_tp_plan(name: str, value: Mapping[str, str] | str | None) -> Mapping[str, str] | None:
    """Returns the dict that a command line gives as JSON; anything else as it is.

    Raises: ConfigError, naming the setting, for text that is no JSON object.
    """
    if not isinstance(value, str):
        return value
    try:
        plan = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r} is no JSON: {error}") from None
    if not isinstance(plan, dict):
        raise ConfigError(f'{name}={value!r}: must be a JSON object, such as {{"mlp.gate": "replicate"}}')
    return plan


def parse_partition(name: str, value: object) -> Partition:
    """Returns BLOCKS, GRAPH, or names of modules as a tuple; text names them with commas between.

    Raises: ConfigError for anything else.
    """
    if value in (BLOCKS, GRAPH):
        return str(value)
    names = [one.strip() for one in value.split(",")] if isinstance(value, str) else value
    if isinstance(names, (list, tuple)) and names and all(isinstance(one, str) and one for one in names):
        return tuple(names)
    raise ConfigError(f'{name}={value!r}: must be "{BLOCKS}", "{GRAPH}", or the names of the modules')


def text_of_bytes(size: int) -> str:
    """Returns a size as the settings take it, such as "812 B" or "7.98 GB": rounded up, so that it is enough."""
    unit, word = next(((10**e, w) for e, w in ((9, "GB"), (6, "MB"), (3, "kB")) if size >= 10**e), (1, "B"))
    return f"{math.ceil(size / unit * 100) / 100:.2f}".rstrip("0").rstrip(".") + f" {word}"


def _torchrun(processes: int) -> str:
    """Returns the command line that starts this script on so many processes."""
    script = sys.argv[0] if sys.argv and Path(sys.argv[0]).suffix == ".py" else "SCRIPT.py"
    words = [script, *sys.argv[1:]] if script != "SCRIPT.py" else [script, "..."]
    return f"torchrun --standalone --nproc-per-node {processes} {shlex.join(words)}"
