"""CallTree: which module calls which in one forward pass, and what share of the work each has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fold3d.trace.results.flops import flops_of


class CallTree(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode and module hooks around one forward of `model` (a copy whose tensors are fake)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack: list[str] = []
        self._calls: dict[str, int] = {}
        self._called_by: dict[str, list[str]] = {}
        self._flops: dict[str, int] = {}
        self._parameters = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(name), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._calls[name] = self._calls.get(name, 0) + 1
            if self._stack:
                self._called_by.setdefault(self._stack[-1], []).append(name)
            self._stack.append(name)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flops = flops_of(func.overloadpacket, args, kwargs, result)
        if flops:
            for name in dict.fromkeys(self._stack):
                self._flops[name] = self._flops.get(name, 0) + flops
        return result

    def inside(self, name: str) -> list[str]:
        """Returns the modules with parameters that module `name` ("": the model) calls itself, in the order in which
        they run: those of its own that run once in the forward pass."""
        prefix = f"{name}." if name else ""
        return [
            one
            for one in dict.fromkeys(self._called_by.get(name, ()))
            if one.startswith(prefix) and self._calls[one] == 1 and self._parameters[one]
        ]

    def share(self, name: str) -> float:
        """Returns the larger one of a module's shares in the model's FLOPs and in its parameters."""
        flops = self._flops.get(name, 0) / max(1, self._flops.get("", 0))
        return float(max(flops, self._parameters[name] / max(1, self._parameters[""])))
