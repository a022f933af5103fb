"""record_calls(): with which arguments a forward of the model calls its modules; shapes only, no memory. time_call():
how long one takes, forward and backward, on a copy of it with made-up values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fold3d.device import rng_untouched, synchronize
from fold3d.trace import copy_without_coat
from fold3d.trace.compound import compute_as_linear, holders, is_compound, move, parts_of
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


_MOST_RUNS = 15


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call on one micro-batch."""

    forward: float
    """Seconds."""
    backward: float
    saved_bytes: int
    """Kept from forward to backward, parameters aside."""
    busy: float = 1.0
    """Part of the time in which the thread had a core, or waited for one."""


def time_call(
    module: nn.Module,
    call: ModuleCall,
    device: torch.device,
    *,
    seconds: float,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Timing:
    """Returns the lower quartile of several runs in training mode, after one that does not count.

    What else the machine does only adds time; the fastest run of all may have been lucky.

    Neither the module nor the state of torch's random numbers changes.

    Args:
        module: its parameters may be on the meta device.
        seconds: stop after the run that passes this time; there is at least one that counts.
    Raises: whatever the module raises on values that are made up.
    """
    with rng_untouched(device), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        made = real_copy(module, device, generator).train()
        try:
            return _time_of(made, call, device, generator, seconds=seconds, autocast=autocast)
        finally:
            _empty(made)


def _time_of(
    made: nn.Module,
    call: ModuleCall,
    device: torch.device,
    generator: torch.Generator,
    *,
    seconds: float,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Timing:
    """As `time_call`, of a module that may change."""
    parameters = {part.data_ptr() for p in made.parameters() for part in parts_of(p)}
    begin, had_core = time.perf_counter(), _had_core()
    forwards: list[float] = []
    backwards: list[float] = []
    saved = 0
    while len(forwards) < 2 or (len(forwards) <= _MOST_RUNS and time.perf_counter() - begin < seconds):
        args, kwargs = _inputs(call, device, generator)
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            for part in parts_of(tensor):
                if part.data_ptr() not in parameters:
                    kept[part.data_ptr()] = part.numel() * part.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            start = _now(device)
            with autocast():
                result = made(*args, **kwargs)
            middle = _now(device)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        gradients = [torch.ones_like(output) for output in outputs]
        between = _now(device)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        forwards.append(middle - start)
        backwards.append(_now(device) - between)
        saved = sum(kept.values())
    busy = min(1.0, (_had_core() - had_core) / (time.perf_counter() - begin)) if device.type == "cpu" else 1.0
    return Timing(_lower_quartile(forwards[1:]), _lower_quartile(backwards[1:]), saved, busy)


def _had_core() -> float:
    """Returns for how many seconds this thread has had a core, or waited for one; all of them where the system does not
    count how long it waits."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran, waited, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return time.perf_counter()
    return time.thread_time() + waited / 1e9 if ran else time.perf_counter()


def _lower_quartile(times: list[float]) -> float:
    return quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def _empty(made: nn.Module) -> None:
    """Frees what a copy holds; where a hook of a parameter knows its module, nothing else would ever do so."""
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.grad = None
        if not is_compound(tensor):
            tensor.data = tensor.data.new_empty(0)


def real_copy(module: nn.Module, device: torch.device, generator: torch.Generator) -> nn.Module:
    """Returns a copy of `module` on `device`; what is on the meta device gets small random values."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if not isinstance(tensor, Tensor) or id(tensor) in memo or (is_compound(tensor) and not tensor.is_meta):
                continue
            if tensor.is_meta:
                real = _values(TensorShape(tuple(tensor.shape), tensor.dtype), device, generator) * 0.02
                real = real.to(tensor.dtype)
            else:
                real = tensor.detach().to(device, copy=True)
            if isinstance(tensor, nn.Parameter):
                real = nn.Parameter(real, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = real
    made = copy_without_coat(module, memo)

    def weight(shape: tuple[int, int], dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(_values(TensorShape(shape, dtype), device, generator) * 0.02, requires_grad=False)

    for name, part in holders(module):
        if any(one.is_meta for one in part._parameters.values() if one is not None):
            compute_as_linear(made.get_submodule(name), weight)
        else:
            move(made.get_submodule(name), device)
    return made


def _inputs(
    call: ModuleCall, device: torch.device, generator: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with made-up values; the first one with a fraction is what a backward goes back to."""
    first = True

    def fill(leaf: Any) -> Any:
        nonlocal first
        if not isinstance(leaf, TensorShape):
            return leaf
        values = _values(leaf, device, generator)
        if leaf.dtype.is_floating_point and first:
            first = False
            # Of no leaf: modules may write into what they are given.
            return values.requires_grad_().view_as(values) * 1.0
        return values

    filled: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(fill, (call.args, call.kwargs))
    return filled


def _values(like: TensorShape, device: torch.device, generator: torch.Generator) -> Tensor:
    if like.dtype.is_floating_point:
        return torch.randn(like.shape, generator=generator).to(device, like.dtype)
    if like.dtype == torch.bool:
        return torch.ones(like.shape, dtype=torch.bool, device=device)
    return torch.zeros(like.shape, dtype=like.dtype, device=device)


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
