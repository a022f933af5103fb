"""ShapeOnly: tensors of the shapes that a module would return, without its parameters."""

from __future__ import annotations

import contextvars
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from fold3d.trace.caches import apart_from_caches
from fold3d.trace.known_values import Decisions
from fold3d.trace.made_up import run_with_values
from fold3d.trace.shadow import fake_copy
from fold3d.trace.without_values import NEEDS_VALUES, WithoutMemory, WithoutValues

_CACHE_LIMIT = 1024
_Shapes = tuple[list[Any], TreeSpec]


class ShapeOnly:
    """Stands for a module whose parameters live on another rank and whose values are not needed here.

    Runs the module's own forward on fake tensors of the actual argument shapes, on the actual device and
    under the autocast that is on, and returns tensors like its result. Results are remembered by the shapes of
    the arguments. The values must not matter: `Trace.borders` proves that of the recorded call.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._copies: dict[torch.device, tuple[WithoutValues, nn.Module]] = {}
        self._known: dict[Any, list[tuple[Decisions, _Shapes]]] = {}

    def __call__(
        self,
        device: torch.device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        with_grad: bool = False,
        fill: float = 0.0,
    ) -> Any:
        """Returns tensors on `device`, in the structure that the module would return for these arguments.

        Args:
            with_grad: those in floating point are results of a graph, as code may expect that gives them hooks.
            fill: their values, of those in floating point; 0 of others.
        """
        leaves, spec = tree_flatten((args, kwargs))
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        signature: Any = (
            device, self._module.training, autocast, spec,
            *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        )  # fmt: skip
        try:
            found = self._known.get(signature, [])
        except TypeError:  # an argument that cannot be hashed
            signature, found = None, []
        decides = any(decisions.read or decisions.counted for decisions, _ in found)
        named = _numbers(args, kwargs) if decides else {}
        known = next((shapes for decisions, shapes in found if decisions.hold_for(named, shapes=True)), None)
        if known is None:
            decisions, known = self._infer(device, args, kwargs)
            if signature is not None:
                if len(self._known) >= _CACHE_LIMIT:
                    self._known.clear()
                self._known.setdefault(signature, []).insert(0, (decisions, known))
        shapes, structure = known
        made = [_filled(leaf[0], leaf[1], device, fill) if isinstance(leaf, tuple) else leaf for leaf in shapes]
        if with_grad:  # a clone is no leaf: it may be written to
            made = [
                leaf.requires_grad_().clone() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
                for leaf in made
            ]
        return tree_unflatten(made, structure)

    def _infer(self, device: torch.device, args: Any, kwargs: Any) -> tuple[Decisions, _Shapes]:
        # The copy has hooks as the module has, such as those by which transformers collects hidden states in a variable
        # of the context; what runs on shapes is not to be collected.
        apart = contextvars.Context()
        try:
            return apart.run(self._infer_with, device, args, kwargs, False)
        except NEEDS_VALUES:
            return apart.run(self._infer_with, device, args, kwargs, True)

    def _infer_with(self, device: torch.device, args: Any, kwargs: Any, values: bool) -> tuple[Decisions, _Shapes]:
        mode, module = self._copy_for(device)
        module.train(self._module.training)
        mode.forget()

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)

        numbers = _numbers(args, kwargs) if values else None  # with the mode they would have none
        with apart_from_caches(module), mode, torch.no_grad():
            fake_args, fake_kwargs = tree_map(fake, (args, kwargs))
            if numbers is not None:
                mode.known.give(_named(fake_args, fake_kwargs), numbers)
            try:
                with WithoutMemory():
                    result = module(*fake_args, **fake_kwargs)
            except NEEDS_VALUES:
                if not values:
                    raise
                result = run_with_values(module, fake_args, fake_kwargs, mode)
        leaves, structure = tree_flatten(result)
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return mode.known.decisions(), (shapes, structure)

    def _copy_for(self, device: torch.device) -> tuple[WithoutValues, nn.Module]:
        if device not in self._copies:
            mode = WithoutValues()
            module = fake_copy(self._module, mode, device)
            # Hooks of the module itself run around what stands in for its result; those of its copy would, too, and
            # what they collect (hidden states, for one) would be there twice.
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
            self._copies[device] = (mode, module)
        return self._copies[device]


def _filled(shape: torch.Size, dtype: torch.dtype, device: torch.device, fill: float) -> Tensor:
    value = fill if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(shape, value, dtype=dtype, device=device)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"args": args, "kwargs": kwargs}


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments by name, with 0 for NaN, which stands for others' results: the module may refuse it."""

    def number(leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return torch.nan_to_num(leaf.detach()) if floats else leaf

    return _named(*tree_map(number, (args, kwargs)))
