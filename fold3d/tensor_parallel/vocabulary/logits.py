"""VocabularyParallelLogits: logits of which each rank holds its columns, and which losses take as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.tensor_parallel.vocabulary import losses, rules
from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel, beneath
from fold3d.tensor_parallel.vocabulary.rules import Call, NeedsWhole, Rule, words

_RULES: dict[Any, Rule] = {**rules.rules(), **losses.rules()}
_LOOKING = (
    "size dim ndimension numel nelement stride is_contiguous is_floating_point is_complex get_device "
    "element_size __len__ __hash__ __dir__ register_hook register_post_accumulate_grad_hook retain_grad "
    "requires_grad_ backward detach_ is_same_size storage_offset _is_view is_signed is_inference is_conj "
    "is_neg dim_order"
)
_ABOUT = frozenset(words(_LOOKING))
"""Functions that look at no element."""
_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Properties that are tensors of the same elements."""


class VocabularyParallelLogits(ColumnParallel):
    """What the output head of a model returns where its vocabulary is spread over a tensor-parallel group.

    To all code it is a Tensor of the logits' shape, dtype and device. Elementwise functions, slices and views of other
    dimensions and losses along the vocabulary compute on each rank's columns. Anything else gathers the logits on all
    ranks, with their gradient, and goes on with an ordinary tensor; the log says so once per function. So every rank
    must call it, as every rank runs the same loss function.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(getattr(kind, "defers", False) for kind in types):
            return NotImplemented  # `DeferredLogits` puts others in its place
        call = Call(func, args, kwargs or {})
        rule = _RULES.get(func)
        if rule is not None:
            try:
                return rule(call)
            except NeedsWhole:
                return _on_whole(call)
        if looks_at_no_element(call):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*call.args, **call.kwargs)
        if _writes(call):
            return _write(call)
        return _on_whole(call)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return beneath(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # no gathering: debuggers ask on one rank
        columns = self.columns
        return (
            f"{type(self).__name__}(shape={tuple(self.shape_of_whole())}, dtype={self.memory().dtype}, "
            f"columns {columns.first} to {columns.end - 1} of {columns.size})"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def gathered(value: Any) -> Any:
    """Returns `value`, any nesting of tensors, with whole tensors in the place of logits in parts.

    Every rank of the group calls. To be used where outputs leave the model for code that some ranks do not run.
    """
    if not any(isinstance(leaf, ColumnParallel) for leaf in tree_leaves(value)):
        return value
    return tree_map_only(ColumnParallel, ColumnParallel.whole, value)


def looks_at_no_element(call: Call) -> bool:
    """Whether a function asks for shapes and the like, or is an operator, which goes below autograd."""
    if isinstance(call.function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True  # an operator, such as a dispatch mode calls: `beneath` has it
    kind = getattr(call.function, "__name__", "")
    if kind == "__get__":
        return call.name not in _VALUES
    return call.name in _ABOUT or kind == "__set__"


def _on_whole(call: Call) -> Any:
    def whole(one: ColumnParallel) -> Tensor:
        one.columns.say_gathered(call.name)
        return one.whole()

    args, kwargs = tree_map_only(ColumnParallel, whole, (call.args, call.kwargs))
    return call.function(*args, **kwargs)


def _writes(call: Call) -> bool:
    name = call.name
    in_place = name.endswith("_") and not name.endswith("__")
    return (in_place or name == "__setitem__" or name in _AUGMENTED) and isinstance(call.args[0], ColumnParallel)


_AUGMENTED = {f"__i{name}__": f"__{name}__" for name in words("add sub mul truediv pow and or")}


def _write(call: Call) -> Any:
    """A function that writes into the logits: computes what is to stand there, and copies it."""
    logits: ColumnParallel = call.args[0]
    if logits.is_view and torch.is_grad_enabled() and logits.requires_grad:
        raise RuntimeError(
            f"'{call.name}' writes into a view of logits whose columns are spread over a tensor-parallel group, which "
            "autograd would not see in the logits; write into the logits that the model returned, or into a clone()"
        )
    pure = _AUGMENTED.get(call.name, call.name.removesuffix("_"))
    function = None if call.name == "__setitem__" else getattr(Tensor, pure, None)
    if function is not None and function in _RULES:
        new = function(*call.args, **call.kwargs)
    else:
        logits.columns.say_gathered(call.name)
        new = logits.whole().clone()
        rest, kwargs = tree_map_only(ColumnParallel, ColumnParallel.whole, (call.args[1:], call.kwargs))
        call.function(new, *rest, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.copy_(logits, new)
    return None if call.name == "__setitem__" else logits
