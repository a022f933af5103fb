"""rivals_of(): what data parallelism of the whole model takes on the same processes, as sentences beside a plan."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.plan.costs import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """DDP or HSDP which accumulates its micro-batches and reduces in the backward of the last; milliseconds of a step.

    What stays inside of a host is free of charge, and nothing costs more than its bytes: a bound that favours it.
    """

    name: str
    compute_ms: float
    """With the optimizer's update."""
    window_ms: float
    """The backward that its sum can hide beneath."""
    sum_ms: float
    """Of all gradients, between hosts."""

    @property
    def exposed_ms(self) -> float:
        """What of the sum is not hidden."""
        return max(0.0, self.sum_ms - self.window_ms)

    @property
    def step_ms(self) -> float:
        """Of the whole step."""
        return self.compute_ms + self.exposed_ms

    def against(self, step_ms: float) -> str:
        """Returns a sentence: how a plan of `step_ms` compares, and from which time of the sum on it is ahead."""
        even = max(0.0, step_ms - self.compute_ms + self.window_ms)
        verdict = "" if step_ms < self.step_ms else f": take {self.name} if the model fits"
        return (
            f"{self.name} takes at least {self.step_ms:.1f} ms = compute {self.compute_ms:.1f} + exposed sums "
            f"{self.exposed_ms:.1f}; this plan takes {step_ms / self.step_ms:.2f} of that{verdict}. "
            f"It is ahead where the sums take more than {even:.1f} ms (here {self.sum_ms:.1f})"
        )


def rivals_of(
    whole: Profile, *, bandwidth: float, processes: int, micro_batches: int, ranks_per_host: int | None
) -> tuple[Rival, ...]:
    """Returns DDP and, where the hosts are known and several, HSDP.

    Args:
        whole: costs of the model with no weight shared out.
        bandwidth: bytes per second that a process sends to other hosts.
        micro_batches: of a step, all together.
        ranks_per_host: that HSDP shards between; None: nobody knows.
    """
    gradients = sum(whole.gradient_bytes.values())
    share = micro_batches / processes
    forward, backward = 1e3 * sum(whole.forward), 1e3 * sum(whole.backward)
    names = {"DDP": 1} | ({"HSDP": ranks_per_host} if ranks_per_host and ranks_per_host > 1 else {})
    found = []
    for name, shards in names.items():
        hosts = processes / shards
        if hosts > 1:
            sent = 2 * (hosts - 1) / hosts * gradients / shards
            found.append(
                Rival(
                    name=name,
                    compute_ms=share * (forward + backward) + 1e3 * whole.update_seconds * gradients / shards,
                    window_ms=min(1.0, share) * backward,
                    sum_ms=1e3 * sent / bandwidth,
                )
            )
    return tuple(found)
