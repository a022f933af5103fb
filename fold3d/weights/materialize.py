"""materialize(): gives the owned parameters of a model built on the meta device their values; quantise():
quantised ones, by transformers' own quantiser.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.errors import CheckpointError, TraceError
from fold3d.weights.named_init import initialise
from fold3d.weights.part_marks import mark_part
from fold3d.weights.parts import Parts, check_shape
from fold3d.weights.pretrained import PretrainedFolder, load
from fold3d.weights.release import parameter_holders, replace_parameter


def waiting_to_be_quantised(model: nn.Module) -> set[str]:
    """Returns the names of the frozen parameters on the meta device that transformers quantises when it loads."""
    return {
        f"{prefix}{name}"
        for prefix, part in _quantised(model)
        for name, parameter in part.named_parameters(remove_duplicate=False)
        if parameter.is_meta and not parameter.requires_grad and part.hf_quantizer.param_needs_quantization(part, name)
    }


def quantise(model: nn.Module, names: Sequence[str], folder: str | Path | None) -> None:
    """Reads each of the parameters `names` from the folder, on the CPU, and puts what the quantiser makes of it in its
    place; one at a time.

    Raises: CheckpointError without a folder, or for a folder that has no such weight.
    """
    if folder is None:
        raise CheckpointError(
            f"{names[0]} is to be quantised, and there is no folder with its values: call from_pretrained in "
            "`with fold3d.empty_weights():`, or set `weights`"
        )
    source = PretrainedFolder(folder)
    keys = source.names_in(model)
    missing = next((name for name in names if name not in keys), None)
    if missing is not None:
        raise CheckpointError(f"{folder} has no values for {missing}, which is to be quantised")
    of_key: dict[str, list[str]] = {}
    for name in names:
        of_key.setdefault(keys[name], []).append(name)
    for key in source.in_order(of_key):
        whole = source.read_whole(key)
        for name in of_key[key]:
            prefix, part = next(one for one in _quantised(model) if name.startswith(one[0]))
            short = name.removeprefix(prefix)
            made = part.hf_quantizer.get_quantize_ops().convert(
                {short: [whole.to(model.get_parameter(name).dtype)]},
                model=part, full_layer_name=short, missing_keys={short}, config=part.config,
            )  # fmt: skip
            for place, parameter in made.items():
                replace_parameter(part, [place], parameter)


def _quantised(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the models of transformers that are quantised, with the beginning of their parameters' names."""
    for name, module in model.named_modules():
        if vars(module).get("hf_quantizer") is not None:
            yield f"{name}." if name else "", module


_log = logging.getLogger(__name__)


def materialize(
    model: nn.Module,
    keep: set[str],
    *,
    seed: int,
    folder: str | Path | None = None,
    parts: Parts | None = None,
) -> None:
    """Makes the parameters in `keep`, and all buffers, of a model on the meta device real, on the CPU, in
    place.

    Values come from `folder` where given, else (and for what the folder lacks, with a warning) from the
    model's own initialisation, with random numbers that depend on (seed, name) only: any subset gets the same
    bits. Parameters and buffers that are real already keep their values; tied parameters stay tied;
    parameters outside `keep` stay on meta. What transformers was told to quantise is read, quantised and let go of one
    weight at a time.

    Of a parameter that is spread over a tensor-parallel group only this rank's part gets memory, with the bits that it
    has in the whole; values of the whole are drawn one parameter at a time.

    Args:
        keep: names of parameters; one name of a tied parameter is enough.
        seed: seed of the initial values.
        folder: folder with safetensors weights, see `PretrainedFolder`.
        parts: which part of each parameter is this rank's, and real ones are already; None: all of it.
    Raises: TraceError if a value cannot be known (a parameter without an initialisation, a tensor that is no
        parameter and no buffer); CheckpointError for a bad folder.
    """
    parts = parts or Parts.whole()
    _refuse_lost_attributes(model)
    groups: dict[str, tuple[str, ...]] = {}
    fresh: dict[str, Tensor] = {}
    waiting = waiting_to_be_quantised(model)
    later: list[str] = []
    for parameter, names in parameter_holders(model):
        if parameter.is_meta and not keep.isdisjoint(names):
            if names[0] in waiting:
                later.append(names[0])
                continue
            if (shard := parts.shard_of(names[0])) is not None:
                check_shape(names[0], shard, parameter.shape)
            part = _unset_like(parameter, parts.shape(names[0], parameter.shape))
            real = nn.Parameter(part, requires_grad=parameter.requires_grad)
            vars(real).update(vars(parameter))
            if shard is not None:
                mark_part(real, names[0], shard, parts.rank, parameter.shape)
            replace_parameter(model, names, real)
            fresh[names[0]] = real
            groups[names[0]] = tuple(names)
    buffers = _allocate_buffers(model)
    fresh.update(buffers)
    versions = {name: tensor._version for name, tensor in fresh.items()}
    loaded = load(model, fresh, groups, folder, parts) if folder is not None else set()
    if later:
        quantise(model, later, folder)
    rest = {name: tensor for name, tensor in fresh.items() if name not in loaded}
    absent = [name for name in rest if name not in buffers and "lora_" not in name]
    if folder is not None and absent:
        _log.warning(
            "%s has no values for %d parameters (%s%s); they start from their initial values",
            folder, len(absent), ", ".join(absent[:3]), ", ..." if len(absent) > 3 else "",
        )  # fmt: skip
    if rest:
        initialise(model, rest, seed, parts)
        _refuse_unset(model, rest, versions, buffers)


def _unset_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(shape) == tensor.shape:
        real = torch.empty_like(tensor, device="cpu", requires_grad=False)
    else:
        real = torch.empty(tuple(shape), dtype=tensor.dtype)
    # NaN marks what is still to be filled; one-byte floats have no fill and are checked by version only
    return real.fill_(float("nan")) if _is_marked(real) else real


def _is_marked(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1


def _allocate_buffers(model: nn.Module) -> dict[str, Tensor]:
    found: dict[int, Tensor] = {}
    fresh: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) not in found:
                found[id(buffer)] = _unset_like(buffer, buffer.shape)
                fresh[f"{prefix}.{key}" if prefix else key] = found[id(buffer)]
            module._buffers[key] = found[id(buffer)]
    return fresh


def _refuse_lost_attributes(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise TraceError(
                    f"'{name}.{key}' is a tensor on the meta device that is no parameter and no buffer, so "
                    "its values are lost. Register it as a buffer, compute it in forward, or build the "
                    "model on a real device."
                )


def _refuse_unset(
    model: nn.Module, tensors: dict[str, Tensor], versions: dict[str, int], buffers: dict[str, Tensor]
) -> None:
    present = {id(t) for t in (*model.parameters(), *model.buffers())}
    for name, tensor in tensors.items():
        if id(tensor) not in present:  # the initialisation put another tensor in its place
            continue
        unset = bool(torch.isnan(tensor).any()) if _is_marked(tensor) else tensor._version == versions[name]
        if unset and tensor.numel():
            kind = "buffer" if name in buffers else "parameter"
            holder = model.get_submodule(name.rpartition(".")[0])
            raise TraceError(
                f"{kind} '{name}' was built on the meta device and {type(holder).__name__} has no "
                "initialisation for it (reset_parameters, or _init_weights of a transformers model, must "
                "fill it). Add one, pass a pretrained folder, or build the model on a real device."
            )
