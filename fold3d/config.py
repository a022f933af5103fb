"""ParallelConfig: how one model is spread over processes. Pure data, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.errors import ConfigError

DEFAULT_COMM_TIMEOUT = 300.0
TRANSPORTS = ("auto", "tcp", "c10d")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a model is spread over dp * tp * pp processes and in which order its micro-batches are computed."""

    dp: int | None = None
    """Data-parallel replicas. None: world size / (tp * pp)."""
    tp: int = 1
    """Tensor-parallel ranks; only 1 in this version."""
    pp: int = 1
    """Pipeline stages."""
    segments: int = 1
    """Folds of the model; every segment is cut into pp chunks, so a rank holds `segments` chunks."""
    micro_batches: int = 1
    """m: micro-batches per optimizer step and replica; `Engine.step` divides dimension 0 of the batch by it."""
    schedule: str | None = None
    """Name of a schedule (`fold3d schedules` lists them) or path of a CSV file with compute actions.
    None: "aiao" when segments > 1, else "1f1b"."""
    group_size: int | None = None
    """N: micro-batches that pass a segment before the next segment starts; only for schedules that use it."""
    blocks: str = "auto"
    """Name of the ModuleList or Sequential whose children are the model's blocks; "auto" finds it."""
    recompute: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    seed: int = 0
    """Seed of dropout masks and, for models built on the meta device, of the initial weights."""
    comm_timeout: float | None = None
    """Seconds a rank waits for another before the step fails on every rank. None: 300."""

    transport: str = "auto"
    """How activations travel between stages: "tcp" (host memory, connections of fold3d's own), "c10d" (torch's process
    groups: gloo or NCCL), "auto": tcp for parameters on the CPU, else c10d."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "segments", "micro_batches", "group_size"):
            value = getattr(self, name)
            if value is None and name in ("dp", "group_size"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: must be an integer of at least 1")
        if self.group_size is not None and self.group_size > self.micro_batches:
            raise ConfigError(
                f"group_size={self.group_size} is more than micro_batches={self.micro_batches} and would act like it; "
                "lower group_size, or leave it out"
            )
        if self.tp != 1:
            raise ConfigError(f"tp={self.tp}: tensor parallelism is not available yet; set tp=1 and raise pp or dp")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport={self.transport!r}: must be one of {', '.join(TRANSPORTS)}")
        if self.comm_timeout is not None and not self.comm_timeout > 0:
            raise ConfigError(f"comm_timeout={self.comm_timeout}: must be a positive number of seconds")
        if not self.blocks:
            raise ConfigError('blocks="": name the ModuleList that holds the blocks, or leave it at "auto"')

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model: segments * pp."""
        return self.segments * self.pp

    @property
    def schedule_name(self) -> str:
        """The schedule in force."""
        return self.schedule or ("aiao" if self.segments > 1 else "1f1b")

    @property
    def timeout_seconds(self) -> float:
        """The communication timeout in force, in seconds."""
        return DEFAULT_COMM_TIMEOUT if self.comm_timeout is None else float(self.comm_timeout)

    def resolve_dp(self, world_size: int) -> int:
        """Returns the number of replicas in a job of `world_size` processes.

        Raises: ConfigError unless dp * tp * pp == world_size.
        """
        cells = self.tp * self.pp
        dp = self.dp if self.dp is not None else world_size // cells
        if dp * cells != world_size or dp < 1:
            raise ConfigError(
                f"dp*tp*pp = {dp}*{self.tp}*{self.pp} = {dp * cells}, but the job has {world_size} process(es); "
                "start as many processes (torchrun --nproc-per-node) or change dp or pp"
            )
        return dp
