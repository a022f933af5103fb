"""Scenario: the job that every system runs, and the shortest time a step of it can take."""

from __future__ import annotations

from dataclasses import dataclass, replace

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Copies:
    """How fast an accelerator computes a transformer's layer, and copies what the layer saves.

    Of a token a layer of width h computes 24 h^2 + 4 h s operations forward (Megatron-LM, arXiv 2104.04473, section 3)
    and saves 34 h bytes in 16 bits where attention keeps no scores (Korthikanti et al., arXiv 2205.05198, equation 2).
    """

    flops: float
    """Operations per second, as reached."""
    bytes_per_second: float
    """Both directions together."""
    width: int
    length: int
    """Tokens of a sequence."""

    @property
    def per_forward(self) -> float:
        """Seconds of copying what a layer saves, one way, over the seconds of its forward."""
        copied = 34 * self.width / self.bytes_per_second
        computed = (24 * self.width**2 + 4 * self.width * self.length) / self.flops
        return copied / computed

    def rate(self, *, forward_s: float, saved_bytes: float) -> float:
        """Returns the bytes per second at which `saved_bytes`, saved in `forward_s`, keep the same proportion."""
        return saved_bytes / (self.per_forward * forward_s)


PCIE4 = Copies(flops=156e12, bytes_per_second=25e9, width=12288, length=2048)
"""An A100 at half of its 312 Tflop/s in bf16, 16 lanes of PCIe 4.0 (25 of 31.5 GB/s are reached), layers of GPT-3 175B:
a copy takes 0.70 of a forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A model of equal layers on dp x pp ranks. Times in seconds, sizes in bytes."""

    name: str
    title: str
    dp: int
    """Replicas."""
    pp: int
    """Stages of a replica."""
    segments: int
    """Folds of the model where a system's name gives no other number; also those of the limit's bubble."""
    layers: int
    """Layers of one rank."""
    micro_batches: int
    """m, per step and replica."""
    forward_s: float
    """Forward passes of one rank in one step."""
    backward_s: float
    """Backward passes of one rank in one step."""
    gradient_bytes: int
    """fp32 gradients of one rank."""
    activation_bytes: int
    """What one micro-batch hands from one stage to the next, forward and backward."""
    rate_mbit: float
    """Of each rank's link, each way, in Mbit/s."""
    saved_bytes: int = 0
    """What a layer keeps of a micro-batch for its backward, beside its input."""
    copy_rate: float = 0.0
    """Of copies between an accelerator and its pool, both directions together, in bytes per second; 0: no limit."""
    memory_limit: int = 0
    """Bytes of an accelerator that is too small for what all layers save; 0: none is."""
    steps: int = 5
    """Measured steps of a run, where the command says nothing else."""
    ranks_per_host: int = 1
    """Neighbours that share a host and its link, which then has so many times the rate."""
    slow_host: float = 1.0
    """The layers of the last host's ranks take so many times as long."""

    def on_hosts(self, *, ranks_per_host: int, slow_host: float) -> Scenario:
        """Returns the same job on other hosts. Its limit stays one that nobody can beat.

        Raises: ValueError where the ranks do not fill such hosts, or the last one would be faster.
        """
        if self.ranks % ranks_per_host:
            raise ValueError(f"{self.ranks} ranks do not fill hosts of {ranks_per_host}; change --ranks-per-host")
        if slow_host < 1:
            raise ValueError(f"a slow host's layers take at least 1 times as long, not {slow_host:g}")
        name = self.name + (f", {ranks_per_host} ranks a host" if ranks_per_host > 1 else "")
        name += f", last host's times * {slow_host:g}" if slow_host > 1 else ""
        return replace(self, name=name, ranks_per_host=ranks_per_host, slow_host=slow_host)

    @property
    def shards(self) -> int:
        """Neighbours between which hybrid sharding divides the weights: a host's ranks, or pairs of hosts of one."""
        return max(2, self.ranks_per_host)

    def pace(self, rank: int) -> float:
        """Returns how many times as long the layers of `rank` take."""
        return self.slow_host if rank >= self.ranks - self.ranks_per_host else 1.0

    def with_copy_rate(self, share: float) -> Scenario:
        """Returns the same with copies at `share` of the rate."""
        if share == 1:
            return self
        return replace(self, name=f"{self.name}, copies * {share:g}", copy_rate=self.copy_rate * share)

    def thinned(self, factor: int) -> Scenario:
        """Returns the same times and shares with fewer bytes on slower links, which cost the machine's cores less."""
        if factor == 1:
            return self
        return replace(
            self,
            name=f"{self.name}, bytes and rate / {factor}",
            gradient_bytes=self.gradient_bytes // factor,
            activation_bytes=self.activation_bytes // factor,
            rate_mbit=self.rate_mbit / factor,
            saved_bytes=self.saved_bytes // factor,
            copy_rate=self.copy_rate / factor,
            memory_limit=self.memory_limit // factor,
        )

    def slowed(self, factor: int) -> Scenario:
        """Returns the same shares in steps that last longer: the machine's own work counts for less."""
        if factor == 1:
            return self
        return replace(
            self,
            name=f"{self.name}, times * {factor}",
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            rate_mbit=self.rate_mbit / factor,
            copy_rate=self.copy_rate / factor,
        )

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.pp

    @property
    def compute_s(self) -> float:
        """Forward and backward of one rank in one step."""
        return self.forward_s + self.backward_s

    @property
    def bubble_s(self) -> float:
        """Idle time of an interleaved or folded pipeline whose messages take no time."""
        return self.compute_s * (self.pp - 1) / (self.segments * self.micro_batches)

    @property
    def dp_bytes(self) -> float:
        """What one rank must send for the sum of the gradients."""
        return 2 * (self.dp - 1) / self.dp * self.gradient_bytes

    @property
    def pp_bytes(self) -> int:
        """What the busiest rank sends to other stages in one step."""
        if self.pp == 1:
            return 0
        chunks_sent = 2 * self.segments - (1 if self.pp == 2 else 0)  # the two ends of the model send one way only
        return chunks_sent * self.micro_batches * self.activation_bytes

    @property
    def dp_sync_s(self) -> float:
        """The sum of the gradients on an idle network at full rate, without protocol overhead."""
        return self.dp_bytes * 8 / (self.rate_mbit * 1e6)

    @property
    def communication_s(self) -> float:
        """Everything the busiest rank sends in one step, at full rate."""
        return (self.dp_bytes + self.pp_bytes) * 8 / (self.rate_mbit * 1e6)

    @property
    def copies_per_forward(self) -> float:
        """What a layer saves on its way to the pool, over the layer's forward."""
        if not self.copy_rate:
            return 0.0
        return self.saved_bytes * self.layers * self.micro_batches / self.copy_rate / self.forward_s

    @property
    def limit_s(self) -> float:
        """No schedule with these segments can be faster: max(compute + bubble, communication)."""
        return max(self.compute_s + self.bubble_s, self.communication_s)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="A",
            title="18B on A100 (Fold3D, Table II) in miniature: DP.sync 0.92 x compute",
            dp=2,
            pp=2,
            segments=4,
            layers=16,
            micro_batches=8,
            forward_s=0.317,
            backward_s=0.775,
            gradient_bytes=12_500_000,
            activation_bytes=8192,
            rate_mbit=100,
            steps=4,
        ),
        Scenario(
            name="B",
            title="39B on A100 (Fold3D, Table II) at Megatron's pace, bytes in miniature: DP.sync 0.47 x compute",
            dp=2,
            pp=4,
            segments=4,
            layers=16,
            micro_batches=16,
            forward_s=1.152,
            backward_s=2.826,
            gradient_bytes=12_830_000,
            activation_bytes=8192,
            rate_mbit=54.9,
            steps=3,
        ),
        Scenario(
            name="C",
            title="B with four times the batch: DP.sync 0.12 x compute",
            dp=2,
            pp=4,
            segments=4,
            layers=16,
            micro_batches=64,
            forward_s=4.608,
            backward_s=11.304,
            gradient_bytes=12_830_000,
            activation_bytes=8192,
            rate_mbit=54.9,
            steps=2,
        ),
        Scenario(
            name="D",
            title="large activations: PP.sync 0.36 x compute beside DP.sync 0.46 x compute",
            dp=2,
            pp=2,
            segments=4,
            layers=16,
            micro_batches=8,
            forward_s=0.634,
            backward_s=1.550,
            gradient_bytes=12_500_000,
            activation_bytes=174_080,
            rate_mbit=100,
        ),
        Scenario(
            name="O",
            title="A's compute at the table's pace; layers save 17 times their input, copies as by PCIe 4.0",
            dp=2,
            pp=2,
            segments=4,
            layers=16,
            micro_batches=8,
            forward_s=0.634,
            backward_s=1.550,
            gradient_bytes=12_500_000,
            activation_bytes=8192,
            rate_mbit=100,
            saved_bytes=17 * 8192,
            copy_rate=PCIE4.rate(forward_s=0.634, saved_bytes=17 * 8192 * 16 * 8),
            memory_limit=34_000_000,
        ),
        Scenario(
            name="smoke",
            title="a second of work, to see that everything runs",
            dp=2,
            pp=2,
            segments=2,
            layers=4,
            micro_batches=2,
            forward_s=0.02,
            backward_s=0.04,
            gradient_bytes=64_000,
            activation_bytes=1024,
            rate_mbit=100,
            saved_bytes=4096,
            copy_rate=1e7,
        ),
    )
}
