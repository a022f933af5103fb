"""record_calls(): with which arguments a forward of the model calls its parts; shapes only, no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fold3d.trace.model_trace import Trace
from fold3d.trace.repeated import Twins
from fold3d.trace.shadow import shadow_of


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Stands for a tensor among the arguments of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of a tensor of this shape."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: what it was given and what it returned, with TensorShape in place of tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def record_calls(
    model: nn.Module,
    names: Iterable[str],
    micro_batch: Mapping[str, Any],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    trace: Trace | None = None,
) -> dict[str, ModuleCall]:
    """Returns the first call of each module in `names` that ran in a forward of a copy of `model` on fake tensors.

    Args:
        micro_batch: keyword arguments of the model's forward; only the shapes of its tensors matter.
        autocast: the context in which the model's forward runs.
        trace: the model's recording: of equal blocks a few run, and whole numbers among the arguments of a call in
            another one are those of the one that ran. None: all run.
    Raises: whatever the forward raises on tensors without values.
    """
    calls: dict[str, ModuleCall] = {}
    wanted = list(dict.fromkeys(names))
    with shadow_of(model) as shadow:
        twins = None if trace is None else Twins(shadow.model, trace, micro_batch)
        for name in wanted:
            shadow.model.get_submodule(name).register_forward_hook(_keep(calls, name), with_kwargs=True)
        arguments = shadow.arguments(micro_batch)
        with shadow.running(), torch.no_grad(), autocast():
            shadow.call(arguments)
    if trace is not None and twins is not None:
        instead = {trace.blocks[block]: trace.blocks[twin] for block, twin in twins.of.items()}
        for name in wanted:
            block = next((one for one in _holders(name) if one in instead), None)
            ran = None if block is None else calls.get(instead[block] + name[len(block) :])
            if ran is not None:
                calls.setdefault(name, ran)
    return calls


def _holders(name: str) -> Iterator[str]:
    """Yields a module's name, and those of the modules that it lies in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _keep(calls: dict[str, ModuleCall], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.setdefault(name, ModuleCall(*tree_map(_shape_of, (args, kwargs, result))))

    return hook


def _shape_of(leaf: Any) -> Any:
    return TensorShape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
