"""PartialDraws: code that computes a part of something draws the random numbers that all of it would have drawn there.

So masks of dropout do not depend on how samples, heads or neurons are divided, if generators begin with the same
states. It costs numbers drawn for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fold3d.errors import Fold3dError
from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint, in_reentrant_checkpoint

Size = tuple[int, ...]


class RedrawError(Fold3dError):
    """What is drawn could not be drawn alike when backward computes it again."""


class PartialDraws(TorchFunctionMode):
    """While it is entered, dropout and other random functions draw for the whole and take their part."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """How many draws there were; an activation checkpoint runs again from the number that it began with."""
        self._frames: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._with_grad = torch.is_grad_enabled()
        self._around = frame_of_checkpoint()  # a checkpoint around all of this: who runs it again makes another mode

    def whole(self, size: Size) -> Size | None:
        """Returns the size for the whole of a part that is to be drawn; None where it is drawn as it is."""
        self._follow_checkpoint()
        self.number += 1
        return self.whole_of(size, self.number - 1)

    def whole_of(self, size: Size, number: int) -> Size | None:
        """Returns what `whole` does, for draw `number`."""
        raise NotImplementedError

    def part(self, drawn: Tensor) -> Tensor:
        """Returns the part of what was drawn for the size that `whole` returned last."""
        raise NotImplementedError

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Writes the part into what `part` would return it of."""
        self.part(whole).copy_(part)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        handler = _HANDLERS.get(func)
        return handler(self, func, args, named) if handler is not None else func(*args, **named)

    def _follow_checkpoint(self) -> None:
        """Makes backward draw alike when it runs the code of an activation checkpoint again: torch restores generators
        for it, and autocast, but no function modes."""
        frame: Any = frame_of_checkpoint()
        if frame is None:
            # Not one around all of this, see above.
            if self._with_grad and not torch.is_grad_enabled() and in_reentrant_checkpoint():
                raise RedrawError(
                    "it draws random numbers in a reentrant torch.utils.checkpoint (use_reentrant=False would do)"
                )
        elif frame is not self._around and frame not in self._frames and torch._C._current_graph_task_id() == -1:
            first = self._frames[frame] = self.number
            again = frame.recompute_fn

            def under_mode(*args: Any, **named: Any) -> Any:
                before, self.number = self.number, first
                try:
                    with self:
                        return again(*args, **named)
                finally:
                    self.number = before

            frame.recompute_fn = under_mode


def _dropout(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    x, p, training, inplace = _arguments(args, named)
    size = mode.whole(tuple(x.shape)) if training and p > 0.0 else None
    if size is None:
        return func(*args, **named)
    if func in _FEATURES:  # a mask per channel
        size = (*size[:2], *(1 for _ in size[2:]))
    # By torch's own dropout, whose numbers on an accelerator are those of a kernel of its own.
    noise = torch.dropout(x.new_ones(size), p, True)
    kept = mode.part(noise).clone()  # autograd keeps it: a view would be all of it
    return x.mul_(kept) if inplace else x * kept


def _arguments(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, float, bool, bool]:
    values = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | {
        "p" if name == "p" else "training" if name == "train" else name: value for name, value in named.items()
    }
    return values["input"], values.get("p", 0.5), values.get("training", True), values.get("inplace", False)


def _drawn_like(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    like = args[0]
    size = mode.whole(tuple(like.shape))
    if size is None:
        return func(*args, **named)
    return mode.part(func(like.new_empty(size), *args[1:], **named))


def _drawn_of_size(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    asked = named.pop("size", None) or (args[0] if args and not isinstance(args[0], int) else args)
    size = mode.whole(tuple(asked))
    return mode.part(func(tuple(size), **named)) if size is not None else func(tuple(asked), **named)


def _drawn_in_place(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tensor = args[0]
    size = mode.whole(tuple(tensor.shape))
    if size is None:
        return func(*args, **named)
    with torch.no_grad():
        tensor.copy_(mode.part(func(tensor.new_empty(size), *args[1:], **named)))
    return tensor


def _bernoulli(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    of = args[0]
    size = mode.whole(tuple(of.shape))
    if size is None:
        return func(*args, **named)
    chances = of.new_full(size, 0.5)
    mode.put(chances, of)
    return mode.part(func(chances, *args[1:], **named))


def _attention(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    values = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | named
    query, key, value = values["query"], values["key"], values["value"]
    p, mask, scale = values.get("dropout_p", 0.0), values.get("attn_mask"), values.get("scale")
    size = mode.whole((*query.shape[:-1], key.shape[-2])) if p > 0.0 else None
    if size is None:
        return func(*args, **named)
    if values.get("enable_gqa", False):
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    # What torch computes for a dropout, written out: it takes no mask.
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if values.get("is_causal", False):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    noise = torch.dropout(query.new_ones(size), p, True)
    return (_safe_softmax(scores) * mode.part(noise).clone()) @ value


def _safe_softmax(scores: Tensor) -> Tensor:
    """Returns the softmax over the last dimension, and as torch's attention 0 for a row that is masked whole."""
    masked = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)


_FEATURES = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout, *_FEATURES), _dropout),
    **dict.fromkeys((torch.rand_like, torch.randn_like), _drawn_like),
    **dict.fromkeys((torch.rand, torch.randn), _drawn_of_size),
    **dict.fromkeys((Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_), _drawn_in_place),
    torch.bernoulli: _bernoulli,
    F.scaled_dot_product_attention: _attention,
}
