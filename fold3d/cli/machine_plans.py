"""The planner's answer for a model on machines of several kinds. The model is recorded once; speeds, memory and links
differ.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fold3d.cli import model_option
from fold3d.cluster.cost import Plan
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.cluster.prices import Machine
    from fold3d.plan.costs import NetworkCosts, Profile
    from fold3d.plan.job import Job
    from fold3d.plan.search import Found
    from fold3d.plan.space.mesh import Mesh, Tried

_FLOPS = 1e12
"""Per second, of the device whose times are scaled to others'."""
_FREE = 0.9
"""The part of a GPU's memory that a training can use: the rest is CUDA's, NCCL's, and gaps between allocations."""
_LENGTH = 2048
"""Tokens of a sample where nobody has said them and the model takes more."""
_LATENCY_WITHIN, _LATENCY_BETWEEN = 10e-6, 50e-6
"""Seconds of a message."""


class MachinePlans:
    """Plans of one model for machines."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Args:
        options: `model`, `blocks`, `partition`, and `sample_tokens`, `batch`, `global_samples`, `efficiency`.

        Raises: ConfigError, TraceError for a model that cannot be recorded.
        """
        from fold3d.profile.layers import assumed_profile
        from fold3d.trace import trace
        from fold3d.trace.batches import is_transformers_model

        model: Any
        model, example = model_option.load(options)
        if example is None or set(example) != {"input_ids"}:
            raise ConfigError(f"{options.model!r} is no model whose input is input_ids alone: tokens cannot be counted")
        text = model.config.get_text_config() if is_transformers_model(model) else None
        most = getattr(text, "max_position_embeddings", None)
        length = options.sample_tokens or min(most or _LENGTH, _LENGTH)
        if most is not None and length > most:
            raise ConfigError(f"--sample-tokens is {length}; the model takes {most} at most")
        ids = example["input_ids"][:1, :1].expand(options.batch, length)
        self._model, self._example, self._options = model, {"input_ids": ids}, options
        self._trace = trace(model, blocks=options.blocks, partition=options.partition, example=self._example, chunks=1)
        whole = assumed_profile(model, self._trace, self._example, flops_per_second=_FLOPS)
        self._whole, self._profiles = whole, {1: whole}
        self._refused: dict[int, ConfigError] = {}
        self.tokens = options.global_samples * length
        """Of a step."""
        self.said = f"{model_option.describe(model)}; {options.global_samples} samples of {length} tokens a step"

    def of(self, machine: Machine) -> Plan:
        """Returns the fastest plan; with a reason in place of one where there is none."""
        from fold3d.config import text_of_bytes
        from fold3d.plan.constraints import Constraints
        from fold3d.plan.layout import places
        from fold3d.plan.search import decide_jobs
        from fold3d.plan.space.mesh import meshes, search_meshes

        def decided(jobs: list[Job]) -> list[Found]:
            return decide_jobs(jobs, Constraints(), lambda: True)

        try:
            candidates = meshes(
                machine.all_gpus,
                self._options.global_samples // self._options.batch,
                tp=None,
                pp=None,
                ranks_per_host=machine.gpus,
                most_stages=len(places(self._trace)),
            )
        except ConfigError as error:
            return Plan(machine=machine, rate=0.0, reason=str(error))
        best: Tried = search_meshes(candidates, lambda mesh: self._job(mesh, machine), decided)[0]
        if best.found is None or best.reason:
            needs = f": at least {text_of_bytes(best.found.memory_bytes)} a GPU" if best.found else ""
            return Plan(machine=machine, rate=0.0, reason=f"{best.reason.splitlines()[0]}{needs}")
        proposal, mesh = best.found.proposal(), best.mesh
        return Plan(
            machine=machine,
            rate=1e3 * self.tokens / proposal.step_ms,
            layout=f"dp={mesh.dp} tp={mesh.tp} pp={mesh.pp}",
            flags=self._flags(mesh, proposal.strategy),
            memory_bytes=proposal.memory_bytes,
        )

    def _flags(self, mesh: Mesh, strategy: Any) -> str:
        from fold3d.plan.space.registry import flags_of

        batch, steps = self._options.batch, mesh.micro_batches
        sizes = f"--dp {mesh.dp} --tp {mesh.tp} --pp {mesh.pp}"
        samples = f"--per_device_train_batch_size {batch} --gradient_accumulation_steps {steps}"
        return f"{sizes} {samples} {flags_of(strategy)}"

    def _job(self, mesh: Mesh, machine: Machine) -> Job:
        """Raises: ConfigError for a mesh that the model cannot have."""
        from fold3d.plan.costs import ACTION_SECONDS, BUCKET_SECONDS
        from fold3d.plan.job import Job

        return Job(
            trace=self._trace.under(mesh.tp),
            profile=_at_speed(self._profile(mesh.tp), machine.tflops * 1e12 * self._options.efficiency),
            network=_network(machine),
            dp=mesh.dp,
            tp=mesh.tp,
            pp=mesh.pp,
            micro_batches=mesh.micro_batches,
            memory_limit=int(machine.memory_gb * 1e9 * _FREE),
            action_seconds=ACTION_SECONDS,
            bucket_seconds=BUCKET_SECONDS,
            pool_is_elsewhere=True,
            host_is_elsewhere=True,
            may_split=mesh.tp == 1,
        )

    def _profile(self, tp: int) -> Profile:
        """Returns what one of `tp` ranks that share the weights computes. Raises: ConfigError where they cannot."""
        from fold3d.profile.shard import layers_of_a_shard, of_a_shard
        from fold3d.profile.tp_sync import with_tp_sync
        from fold3d.splitting.plan_sharding import plan_sharding

        if tp in self._refused:  # finding out takes seconds
            raise self._refused[tp]
        if tp not in self._profiles:
            model, example = self._model, self._example
            try:
                sharding = plan_sharding(model, self._trace, example, tp, sequence_parallel=False)
            except ConfigError as error:
                self._refused[tp] = error
                raise
            shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            layers = layers_of_a_shard(model, self._trace, example, sharding)
            shard = of_a_shard(self._whole, self._trace, sharding, shapes, layers)
            self._profiles[tp] = with_tp_sync(shard, model, self._trace, sharding, example)
        return self._profiles[tp]


def _at_speed(profile: Profile, flops: float) -> Profile:
    """Returns the times of a device with so many FLOPs per second."""
    share = _FLOPS / flops
    return replace(
        profile,
        forward=tuple(share * seconds for seconds in profile.forward),
        backward=tuple(share * seconds for seconds in profile.backward),
    )


def _network(machine: Machine) -> NetworkCosts:
    """Returns the links of a GPU: within its machine, or its part of the machine's card."""
    from fold3d.plan.costs import NetworkCosts

    within = machine.within_gbit * 1e9 / 8
    card = within if machine.count == 1 else (machine.network_gbit or 0.0) * 1e9 / 8 / machine.gpus
    latency = _LATENCY_WITHIN if machine.count == 1 else _LATENCY_BETWEEN
    return NetworkCosts(
        pp_latency=latency,
        pp_bandwidth=min(card, within),
        dp_bandwidth=min(card, within),
        hop_latency=latency,
        tp_bandwidth=within,
        tp_latency=_LATENCY_WITHIN,
    )
