"""What the layers of a model cost, for commands that plan: it is recorded once, for devices of any speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fold3d.config import Partition
    from fold3d.plan.costs import Profile
    from fold3d.plan.job import Hosts, Job
    from fold3d.plan.space.mesh import Mesh

_FLOPS = 1e12
"""Per second, of the device whose times are scaled to others'."""


class ModelLayers:
    """Of one model and micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        example: Mapping[str, Any],
        *,
        blocks: str,
        partition: Partition,
        chunks: int = 1,
        recompute: str = "none",
        measure: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Args:
        model, example: on the meta device; the micro-batch.
        chunks: into which it is cut at least.
        recompute: what will be computed again; of interest is what it says of modules inside of blocks.
        measure: time the layers on this machine.
        tell: is told what takes a while.

        Raises: TraceError for a model that cannot be recorded.
        """
        from fold3d.device import default_device
        from fold3d.plan.space.recompute import KNOB as RECOMPUTE
        from fold3d.profile.layers import assumed_profile, profile_model
        from fold3d.stage.recompute import check_patterns
        from fold3d.trace import trace

        self.model, self.example, self._measure, self._tell = model, example, measure, tell
        self.trace = trace(model, blocks=blocks, partition=partition, example=example, chunks=chunks)
        again = RECOMPUTE.read(recompute)
        check_patterns(model, self.trace.blocks, again)
        self._device = default_device() if measure else None
        if self._device is not None:
            whole = profile_model(model, self.trace, example, self._device, recompute=again)
        else:
            whole = assumed_profile(model, self.trace, example, flops_per_second=_FLOPS, recompute=again)
        self._profiles: dict[int, Profile | ConfigError] = {1: whole}  # finding out that there is none takes seconds

    def profile(self, flops: float, tp: int = 1, *, sequence_parallel: bool = False) -> Profile:
        """Returns what one of `tp` ranks that share the weights computes on a device of so many FLOPs per second; where
        layers were measured, on this machine's. Raises: ConfigError where the model cannot be shared out so.
        """
        if tp not in self._profiles:
            try:
                self._profiles[tp] = self._shard(tp, sequence_parallel)
            except ConfigError as error:
                self._profiles[tp] = error
        found = self._profiles[tp]
        if isinstance(found, ConfigError):
            raise found
        return found if self._measure else _scaled(found, _FLOPS / flops)

    def job(self, mesh: Mesh, flops: float, hosts: Hosts, *, sequence_parallel: bool = False, **more: Any) -> Job:
        """Returns what the planner is told of a mesh on hosts with GPUs. Raises: ConfigError as `profile`.

        Args:
            more: of Job.
        """
        from fold3d.plan.costs import ACTION_SECONDS, BUCKET_SECONDS
        from fold3d.plan.job import Job

        values: dict[str, Any] = {
            "network": hosts.network(mesh.dp * mesh.tp * mesh.pp, mesh.tp),
            "hosts": hosts.of_places(mesh.dp, mesh.pp, mesh.tp),
            "pool_is_elsewhere": True,
            "host_is_elsewhere": True,
            "may_split": mesh.tp == 1,
            "action_seconds": ACTION_SECONDS,
            "bucket_seconds": BUCKET_SECONDS,
        }
        return Job(
            trace=self.trace.under(mesh.tp),
            profile=self.profile(flops, mesh.tp, sequence_parallel=sequence_parallel),
            dp=mesh.dp,
            tp=mesh.tp,
            pp=mesh.pp,
            micro_batches=mesh.micro_batches,
            **(values | more),
        )

    def _shard(self, tp: int, sequence_parallel: bool) -> Profile:
        from fold3d.profile.shard import halves_factor, shard_profile
        from fold3d.splitting.plan_sharding import plan_sharding

        whole = self._profiles[1]
        assert not isinstance(whole, ConfigError)
        self._tell(f"dividing blocks among {tp} ranks")
        model, example = self.model, self.example
        sharding = plan_sharding(model, self.trace, example, tp, sequence_parallel=sequence_parallel)
        found = shard_profile(whole, model, self.trace, example, sharding)
        if self._device is None:
            return found
        factor = halves_factor(model, self.trace, example, self._device, parts=found.sub_micro_batches)
        return replace(found, halves_factor=factor)


def _scaled(profile: Profile, share: float) -> Profile:
    """Returns the costs with other times of layers."""

    def of(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(share * one for one in seconds)

    inside = tuple(replace(one, seconds=of(one.seconds)) for one in profile.inside)
    return replace(profile, forward=of(profile.forward), backward=of(profile.backward), inside=inside)
