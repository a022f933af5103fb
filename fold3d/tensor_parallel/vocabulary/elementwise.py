"""Functions of each element on its own, computed on parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fold3d.tensor_parallel.vocabulary.call import Call, NeedsWhole, Rule, functions
from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel

_UNARY = (
    "float double half bfloat16 clone contiguous positive __pos__ neg negative __neg__ abs __abs__ exp expm1 "
    "log log1p log2 sqrt rsqrt square reciprocal tanh sigmoid logsigmoid relu gelu silu softplus sin cos erf "
    "clamp clip clamp_min clamp_max round floor ceil sign isnan isinf isfinite isneginf isposinf nan_to_num "
    "logical_not __invert__ bool int long zeros_like ones_like empty_like full_like"
)
_NARY = (
    "add sub subtract rsub mul multiply div divide true_divide pow maximum minimum fmax fmin where "
    "masked_fill lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logaddexp __add__ __radd__ "
    "__sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__ __eq__ "
    "__ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__"
)


def elementwise(call: Call) -> Any:
    """Computes the function on this rank's part of each argument.

    Other tensors are shared, or cut where they have a column for each entry of the vocabulary.
    """
    ours = [tensor for tensor in call.tensors() if isinstance(tensor, ColumnParallel)]
    first, behind = ours[0], ours[0].behind()
    if call.kwargs.keys() & {"out", "inplace"} or not all(one.matches(first) for one in ours):
        raise NeedsWhole
    if call.kwargs.get("device", first.memory().device) != first.memory().device:
        raise NeedsWhole
    size, columns = first.columns.size, first.columns
    most = 0
    parts: dict[int, ColumnParallel] = {}

    def local(tensor: Tensor) -> Tensor:
        nonlocal most
        if isinstance(tensor, ColumnParallel):
            most = max(most, tensor.memory().ndim)
            part = tensor.part()
            parts[id(part)] = tensor
            return part
        most = max(most, tensor.ndim)
        if tensor.ndim < behind or tensor.shape[-behind] == 1:
            return columns.share(tensor)
        if tensor.shape[-behind] != size:
            raise NeedsWhole  # and torch's own error there
        return columns.scatter(tensor, tensor.ndim - behind)

    args, kwargs = tree_map_only(Tensor, local, (call.args, call.kwargs))
    result = call.function(*args, **kwargs)
    if not isinstance(result, Tensor):  # a comparison with None, say
        return result
    if id(result) in parts:  # nothing to do: such as float() of what is float32
        return parts[id(result)]
    return first.like(result, most - behind)


def cast(call: Call) -> Any:
    """`to`, `type`, `type_as`: another dtype. What goes to another device goes there whole."""
    logits = call.args[0]
    if not isinstance(logits, ColumnParallel):  # like it, is something else
        if call.name == "type_as":
            return call.args[0].to(dtype=call.args[1].memory().dtype, device=call.args[1].memory().device)
        found = [one.memory() if isinstance(one, ColumnParallel) else one for one in call.args]
        return call.function(*found, **call.kwargs)
    others = [one.memory() if isinstance(one, ColumnParallel) else one for one in call.args[1:]]
    kwargs = {k: one.memory() if isinstance(one, ColumnParallel) else one for k, one in call.kwargs.items()}
    target = kwargs.get("device", others[0] if others else None)
    target = target.device if isinstance(target, Tensor) else target
    memory = logits.memory()
    if isinstance(target, (str, torch.device, int)) and torch.empty(0, device=target).device != memory.device:
        raise NeedsWhole
    part = logits.part()
    result = call.function(part, *others, **kwargs)
    if not isinstance(result, Tensor):  # the name of its type
        return result
    if result is part:
        return logits
    return logits.like(result, logits.vocabulary_dim)


def detach(call: Call) -> ColumnParallel:
    """`detach` and `data`: the same memory without a gradient."""
    logits = call.subject()
    return type(logits)(logits.memory().detach(), logits.columns, logits.vocabulary_dim, True)


def rules() -> dict[Any, Rule]:
    """Returns the rules of this file by function."""
    found: dict[Any, Rule] = dict.fromkeys(functions(f"{_UNARY} {_NARY}"), elementwise)
    found.update(dict.fromkeys(functions("to type type_as"), cast))
    found.update({Tensor.detach: detach, torch.detach: detach, Tensor.data.__get__: detach})  # type: ignore[attr-defined]
    return found
