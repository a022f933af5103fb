"""Arguments: how a loss function calls the model, found out without running the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fold3d.errors import TraceError


class Arguments(dict[str, Any]):
    """Keyword arguments of a forward. `module` names the module that was called: "" is the model itself."""

    module: str = ""

    def called(self, model: nn.Module) -> nn.Module:
        """Returns the module of `model`, or of a copy of it, whose forward takes the arguments."""
        return model.get_submodule(self.module)


class _Reached(BaseException):
    """Ends the loss function where it calls the model. No Exception, so that no `except Exception` swallows it."""

    def __init__(self, module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(module)
        self.module, self.args_of, self.kwargs_of = module, args, kwargs


def arguments_of(model: nn.Module, blocks: Iterable[str], call: Callable[[], Any]) -> Arguments:
    """Runs `call` as far as its first call of `model`, and returns with which arguments that was.

    Args:
        blocks: names of the model's blocks; calling one of the modules they lie in counts as calling the model.
    Raises: TraceError when `call` does not call the model; whatever `call` raises before.
    """
    undo: list[Callable[[], None]] = []
    try:
        for name in ancestors(blocks):
            undo.append(_intercept(model.get_submodule(name), name))
        call()
    except _Reached as reached:
        return _by_name(model, reached)
    finally:
        for remove in reversed(undo):
            remove()
    raise TraceError(
        f"the loss function returned without calling {type(model).__name__}, so what it wants of it cannot be told; "
        "call the model that it is given, model(**inputs)"
    )


def ancestors(blocks: Iterable[str]) -> list[str]:
    """Returns the names of the modules that the blocks lie in, the model itself ("") first."""
    found = {""}
    for block in blocks:
        found.update(block[:i] for i, letter in enumerate(block) if letter == ".")
    return sorted(found)


def _intercept(module: nn.Module, name: str) -> Callable[[], None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(name, args, kwargs)

    def forward(*args: Any, **kwargs: Any) -> None:
        raise _Reached(name, args, kwargs)

    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    own = vars(module).get("forward")
    module.forward = forward  # who calls model.forward comes by no hook

    def undo() -> None:
        handle.remove()
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


def _by_name(model: nn.Module, reached: _Reached) -> Arguments:
    forward = model.get_submodule(reached.module).forward
    try:
        bound = inspect.signature(forward).bind(*reached.args_of, **reached.kwargs_of)
    except TypeError as error:
        raise TraceError(f"the loss function calls {type(model).__name__} with wrong arguments: {error}") from error
    found = Arguments()
    found.module = reached.module
    for name, parameter in bound.signature.parameters.items():
        if name not in bound.arguments:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.update(bound.arguments[name])
        elif parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            if bound.arguments[name] != ():
                raise TraceError(f"the loss function calls the model with arguments that have no name (*{name})")
        else:
            found[name] = bound.arguments[name]
    return found
