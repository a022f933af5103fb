"""quantise(): gives quantised weights on the meta device their values, by transformers' own quantiser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fold3d.errors import CheckpointError
from fold3d.weights.pretrained import PretrainedFolder
from fold3d.weights.release import replace_parameter


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
