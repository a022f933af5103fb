"""Marks on parameters that hold a part: whoever copies or saves one is told that it is no whole weight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from fold3d.errors import MissingWeightsError
from fold3d.sharding.shard import Shard
from fold3d.trace.coat import Coat, Hook, Wrap
from fold3d.trace.wrappers import drop_hooks, set_whole_shape
from fold3d.weights.release import INSTEAD

_PART = "_fold3d_part"
_NAMES_ARE_READ: ContextVar[bool] = ContextVar("names_are_read", default=False)


def mark_part(parameter: nn.Parameter, name: str, shard: Shard, rank: int, whole: Sequence[int]) -> None:
    """Notes on a parameter which part of the whole one, of shape `whole`, it holds from now on.

    Copying it, and pickling it, raise MissingWeightsError; memory is read as before.
    """
    set_whole_shape(parameter, whole)
    refuse = partial(_refuse, name, shard.ranks)
    vars(parameter).update({_PART: (shard, rank), "__deepcopy__": refuse, "__reduce_ex__": refuse})


def part_of(parameter: Tensor) -> tuple[Shard, int] | None:
    """Returns how the whole parameter is spread, and whose part this is; None for a whole one."""
    found: tuple[Shard, int] | None = vars(parameter).get(_PART)
    return found


def is_part(parameter: Tensor) -> bool:
    """Returns whether the parameter holds a part of the whole one."""
    return part_of(parameter) is not None


def refuse_states(model: nn.Module) -> None:
    """Has `state_dict()` of the model, and of its modules that hold parts, raise MissingWeightsError: a file made of it
    would look whole."""
    for module, name, ranks in _holders(model):
        if not any(_is_of(Wrap.STATE_REFUSED, hook) for hook in module._state_dict_hooks.values()):
            Coat().put(Wrap.STATE_REFUSED, module, partial(_refuse_state, name, ranks))


def refuse_calls(model: nn.Module) -> None:
    """Has modules that hold parts, when they are called, raise MissingWeightsError: what ranks compute of parts is put
    together no longer, and may look like a result of the whole."""
    for module, name, ranks in _holders(model):
        if not any(_is_of(Wrap.CALL_REFUSED, hook) for hook in module._forward_pre_hooks.values()):
            Coat().put(Wrap.CALL_REFUSED, module, partial(_refuse_call, name, ranks))


@contextlib.contextmanager
def calls_allowed(model: nn.Module) -> Iterator[None]:
    """Ends what `refuse_calls` began, wherever it did, unless the body raises."""
    for module in model.modules():
        drop_hooks(module, partial(_is_of, Wrap.CALL_REFUSED))
    try:
        yield
    except BaseException:
        refuse_calls(model)
        raise


def _holders(model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Yields the modules that hold parts, each with the name of one of them and over how many ranks it is spread."""
    for path, module in model.named_modules():
        parts = ((name, part_of(one)) for name, one in module.named_parameters(path, recurse=False))
        found = next(((name, part) for name, part in parts if part is not None), None)
        if found is not None:
            name, (shard, _) = found
            yield module, name, shard.ranks


def state_of(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Returns `model.state_dict()` for its names, dtypes and objects, also where it holds parts."""
    token = _NAMES_ARE_READ.set(True)
    try:
        return model.state_dict(keep_vars=keep_vars)
    finally:
        _NAMES_ARE_READ.reset(token)


def _is_of(row: Wrap, hook: Any) -> bool:
    return isinstance(hook, Hook) and hook.row is row


def _refuse_state(name: str, ranks: int, *_: Any) -> None:
    if not _NAMES_ARE_READ.get():
        _refuse(name, ranks)


def _refuse_call(name: str, ranks: int, *_: Any) -> NoReturn:
    raise MissingWeightsError(
        f"{_spread(name, ranks)}, but the engine that puts together what the ranks compute is closed, or gone. Call "
        "the model before engine.close(), and keep the engine or trainer as long as it is used; or load what "
        "trainer.save_model() has written, which is whole"
    )


def _refuse(name: str, ranks: int, *_: Any) -> NoReturn:
    raise MissingWeightsError(
        f"{_spread(name, ranks)}, so the model can be neither copied nor saved by itself. {INSTEAD}"
    )


def _spread(name: str, ranks: int) -> str:
    return f"{name} is spread over the {ranks} ranks of a tensor-parallel group, and this process has a part of it"
