"""The model that a subcommand is about: a transformers configuration, or a function that makes one."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fold3d.config import BLOCKS, ParallelConfig
from fold3d.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fold3d.config import Partition
    from fold3d.plan.costs import Profile
    from fold3d.plan.job import Hosts, TrainingJob
    from fold3d.plan.space.mesh import Mesh


_ON_THE_HUB = re.compile(r"[\w.-]*\w(/[\w.-]*\w)?")
"""A model's name, with or without whose it is."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL_OR_CONFIG, --blocks and --partition to a subcommand's parser."""
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a transformers folder, config.json or name on the hub, such as openai-community/gpt2 (weights are not "
        "read), or MODULE:FUNCTION, a function without arguments that returns a module, or a module and an example "
        "batch (a dict of tensors)",
    )
    parser.add_argument(
        "--blocks", default="auto", help="name of the module list with the blocks; default: found automatically"
    )
    parser.add_argument(
        "--partition",
        default=BLOCKS,
        help="where to cut: between blocks (default); graph: after modules with few outputs, for models without a list "
        "of equal blocks; or the names of the modules to cut between, A,B,C",
    )


def say(text: str) -> None:
    """Says on a terminal what takes a while; whoever reads standard error otherwise looks for errors there."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def load(options: argparse.Namespace) -> tuple[nn.Module, Mapping[str, Tensor] | None]:
    """Returns the model on the meta device and an example batch, if there is one or it can be made up.

    Checks `options.partition`, too. Raises: ConfigError for what is no model, or no partition.
    """
    from fold3d.trace.batches import is_transformers_model, synthetic_example

    options.partition = ParallelConfig(blocks=options.blocks, partition=options.partition).partition
    model, example = _load(options.model)
    if example is None and is_transformers_model(model):
        example = synthetic_example(model)
    return model, example


def _load(source: str) -> tuple[nn.Module, Mapping[str, Tensor] | None]:
    """Returns the model on the meta device and its example batch, if there is one."""
    import torch

    from fold3d.trace.from_config import model_from_config

    if _is_config(source):
        return model_from_config(source), None
    module_name, colon, function_name = source.partition(":")
    if not colon:
        raise ConfigError(
            f"{source!r} is neither a folder, nor a config.json, nor a name on the hub, nor MODULE:FUNCTION (as in "
            "my_package.models:build)"
        )
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: no module's name before the colon
        raise ConfigError(f"{source!r}: {error}") from None
    if not callable(function):
        raise ConfigError(f"{source!r} is a {type(function).__name__}, and must be a function that returns a module")
    try:
        with torch.device("meta"):
            result = function()
    except Exception as error:  # of the user's code there is no end of kinds
        *_, last = traceback.extract_tb(error.__traceback__)
        raise ConfigError(
            f"{source!r} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno}); it runs on the meta "
            "device, where tensors have no values"
        ) from error
    model, *batch = result if isinstance(result, tuple) else (result,)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{source!r} returned a {type(model).__name__}, not a torch.nn.Module")
    if not batch:
        return model, None
    if len(batch) > 1 or not isinstance(batch[0], Mapping):
        kinds = ", ".join(type(one).__name__ for one in batch)
        raise ConfigError(f"{source!r} returned a module and {kinds}; return (model, batch), batch a dict of tensors")
    for name, value in batch[0].items():
        if not isinstance(value, torch.Tensor) or value.numel() == 0:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ConfigError(f"{source!r}: batch[{name!r}] is {what}; it must be a tensor with at least one sample")
    # Tensors that were there before the call are where they were made, and the model is not.
    return model, {name: value.to("meta") for name, value in batch[0].items()}


def is_config(options: argparse.Namespace) -> bool:
    """Whether the model is a configuration, for which batches are made up."""
    return _is_config(options.model)


def _is_config(source: str) -> bool:
    """Whether it is a folder or file, or may be a name on the hub: who misspells a file shall not wait for that."""
    return os.path.exists(source) or (_ON_THE_HUB.fullmatch(source) is not None and not source.endswith(".json"))


def dtype_of(options: argparse.Namespace) -> str | None:
    """Returns the name of the dtype that a configuration has; None where it says nothing."""
    from fold3d.trace.from_config import dtype_of_config

    return dtype_of_config(options.model) if is_config(options) else None


def describe(model: nn.Module) -> str:
    """Returns the model's class and size."""
    return f"{type(model).__name__}, {count(sum(p.numel() for p in model.parameters()))} parameters"


def shapes_of(example: Mapping[str, Tensor]) -> str:
    """Returns the names and shapes of a batch."""
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in example.items() if hasattr(value, "shape"))


def size(number: float) -> str:
    """Returns a number of bytes for people, such as "4.2 MB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g} B"


def count(number: float, billion: str = "B") -> str:
    """Returns a large number for people, such as "124 M".

    Args:
        billion: the unit of 10^9: "B" of parameters, "G" of FLOPs.
    """
    for unit, name in ((1e12, "T"), (1e9, billion), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"


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

    def job(
        self, mesh: Mesh, flops: float, hosts: Hosts, *, sequence_parallel: bool = False, **more: Any
    ) -> TrainingJob:
        """Returns what the planner is told of a mesh on hosts with GPUs. Raises: ConfigError as `profile`.

        Args:
            more: of Job.
        """
        from fold3d.plan.costs import ACTION_SECONDS, BUCKET_SECONDS
        from fold3d.plan.job import TrainingJob

        values: dict[str, Any] = {
            "network": hosts.network(mesh.dp * mesh.tp * mesh.pp, mesh.tp),
            "hosts": hosts.of_places(mesh.dp, mesh.pp, mesh.tp),
            "pool_is_elsewhere": True,
            "host_is_elsewhere": True,
            "may_split": mesh.tp == 1,
            "action_seconds": ACTION_SECONDS,
            "bucket_seconds": BUCKET_SECONDS,
        }
        return TrainingJob(
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
