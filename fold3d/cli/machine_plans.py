"""The planner's answer for a model on machines of several kinds. The model is recorded once; speeds, memory and links
differ.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fold3d.cli import model_option
from fold3d.cli.model_layers import ModelLayers
from fold3d.cluster.cost import Plan
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from fold3d.cluster.prices import Machine
    from fold3d.plan.job import Job
    from fold3d.plan.search import Found
    from fold3d.plan.space.mesh import Mesh, Tried

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
        self._options = options
        self._layers = ModelLayers(model, {"input_ids": ids}, blocks=options.blocks, partition=options.partition)
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
                most_stages=len(places(self._layers.trace)),
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
        from fold3d.plan.hosts import Hosts, Link

        hosts = Hosts(
            per_host=machine.gpus,
            between=Link((machine.network_gbit or machine.within_gbit) * 1e9 / 8, _LATENCY_BETWEEN),
            within=Link(machine.within_gbit * 1e9 / 8, _LATENCY_WITHIN),
        )
        flops, memory = machine.tflops * 1e12 * self._options.efficiency, int(machine.memory_gb * 1e9 * _FREE)
        return self._layers.job(mesh, flops, hosts, memory_limit=memory)
