"""run_with_values(): runs a module that decides by what it computes, to learn what it returns, with made-up numbers.

A router that sends tokens to experts by `.tolist()` cannot run on tensors without values. What it decides matters to
nobody outside of the module but by what that returns, and the shapes of that do not depend on it, as a rule.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.errors import TraceError
from fold3d.torch_private import StorageLabels, unwrap_call
from fold3d.trace.coat import copy_without_coat
from fold3d.trace.without_values import WithoutValues
from fold3d.trace.wrappers import drop_hooks

MOST = 1 << 28
"""Elements of weights that are made up."""


def run_with_values(module: nn.Module, args: Any, kwargs: Any, mode: WithoutValues, *, twice: bool = False) -> Any:
    """Returns what the module returns, without values, of a run by itself on weights, and on arguments as far as their
    values are not known, that are drawn at random. No hooks are called, and the module is not touched.

    Args:
        module: a copy without values, of `mode`.
        twice: runs it with other numbers as well, to see whether its result is of the same shapes.
    Raises: TraceError where the run does more than its result says: keeps a tensor, or writes into an argument; when
        there are too many weights, or the result of a second run is of other shapes; whatever the module raises.
    """
    if sum(parameter.numel() for parameter in module.parameters()) > MOST:
        raise TraceError(f"more than {MOST:,} weights would have to be made up")
    shapes, stand_in = _run(module, args, kwargs, mode, 0)
    if twice and _run(module, args, kwargs, mode, 1)[0] != shapes:
        raise TraceError("the shapes of what it returns depend on what it computes")
    places = iter(shapes)

    def fake(_: _Place) -> Tensor:
        shape, stride, dtype = next(places)
        return torch.empty_strided(shape, stride, dtype=dtype)

    with mode:
        return tree_map_only(_Place, fake, stand_in)


_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _run(module: nn.Module, args: Any, kwargs: Any, mode: WithoutValues, seed: int) -> tuple[list[_Shape], Any]:
    """Returns shapes, strides and dtypes of the tensors in the result, and the result with a place for each."""
    draw = torch.Generator().manual_seed(seed)

    def value(tensor: Tensor) -> Tensor:
        known = mode.known.of(tensor)
        if known is not None:
            return known.clone()
        if tensor.is_floating_point() or tensor.is_complex():
            return (0.02 * torch.randn(tensor.shape, generator=draw)).to(tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        real = _with_values(module, value)
        given = tree_map_only(Tensor, value, (args, kwargs))
        before = _attributes(real)
        made = _MadeMemory()
        with made:
            result = real(*given[0], **given[1])
        if any(leaf._version for leaf in tree_leaves(given) if isinstance(leaf, Tensor)):
            raise TraceError("it writes into what it is given")
        if _attributes(real) != before:
            raise TraceError("it keeps what it has computed in an attribute")
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        shapes = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in tensors]
        stand_in = tree_map_only(Tensor, lambda leaf: _Place(), result)
        del result, tensors, given, real, before
        if made.escaped():
            raise TraceError("it hands what it has computed to somebody in another way than by returning it")
    return shapes, stand_in


class _Place:
    """Where a tensor is in a result."""


class _MadeMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = StorageLabels[bool]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._made[leaf] = True
        return result

    def escaped(self) -> bool:
        """Whether somebody still holds any."""
        gc.collect()
        return bool(self._made.values())


def _with_values(module: nn.Module, value: Any) -> nn.Module:
    memo: dict[int, Any] = {}
    for one in module.modules():
        # Hooks go again, and what they belong to need not be copied.
        memo.update(
            (id(hook), hook) for hooks in (one._forward_pre_hooks, one._forward_hooks) for hook in hooks.values()
        )
        for tensor in (*one._parameters.values(), *one._buffers.values(), *vars(one).values()):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                real = value(tensor)
                memo[id(tensor)] = nn.Parameter(real, requires_grad=False) if isinstance(tensor, nn.Parameter) else real
    made = copy_without_coat(module, memo)
    for one in made.modules():
        unwrap_call(one)
        drop_hooks(one, lambda _: True)
    return made


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    own = ("_parameters", "_buffers", "_modules")
    found = []
    for one in module.modules():
        values = {name: value for name, value in vars(one).items() if name not in own}
        found.append({k: v if isinstance(v, (bool, int, float, str)) else _identity(v) for k, v in values.items()})
    return found


def _identity(value: Any) -> Any:
    leaves = tree_leaves(value)
    return id(value), tuple(id(leaf) for leaf in leaves)
