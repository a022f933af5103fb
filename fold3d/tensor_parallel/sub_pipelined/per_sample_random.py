"""PerSampleRandom: part of a batch draws the random numbers that the whole batch would have drawn for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fold3d.errors import Fold3dError
from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint, in_reentrant_checkpoint


class NotPerSampleError(Fold3dError):
    """What a sample draws cannot be made independent of the other samples."""


class PerSampleRandom(TorchFunctionMode):
    """While it is entered, dropout and other random functions draw for all samples and take those of [first, end).

    So a sample's masks do not depend on how its micro-batch is divided, if the generators begin with the same states.
    Tensors whose dimension 0 is a multiple of the samples' number follow the samples, which is the caller's to check.
    It costs numbers drawn for nothing.
    """

    def __init__(self, first: int, end: int, samples: int) -> None:
        super().__init__()
        self._first, self._end, self._samples = first, end, samples
        self.used = False
        """Whether anything was drawn."""
        self._again: WeakSet[Any] = WeakSet()  # checkpoints that run again under this mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        handler = _HANDLERS.get(func)
        return handler(self, func, args, named) if handler is not None else func(*args, **named)

    def whole(self, size: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the size for all samples of a tensor with `size`; None for one that does not follow the samples."""
        mine = self._end - self._first
        if not size or size[0] % mine:
            return None
        return (size[0] // mine * self._samples, *size[1:])

    def part(self, drawn: Tensor) -> Tensor:
        """Returns what belongs to these samples."""
        each = drawn.shape[0] // self._samples
        self.used = True
        self._follow_checkpoint()
        return drawn[self._first * each : self._end * each]

    def _follow_checkpoint(self) -> None:
        """Makes backward draw alike when it runs the code of an activation checkpoint again: torch restores generators
        for it, and autocast, but no function modes."""
        frame: Any = frame_of_checkpoint()
        if frame is None:
            if not torch.is_grad_enabled() and in_reentrant_checkpoint():
                raise NotPerSampleError(
                    "it draws random numbers in a reentrant torch.utils.checkpoint (use_reentrant=False would do)"
                )
        elif frame not in self._again and torch._C._current_graph_task_id() == -1:
            self._again.add(frame)
            again = frame.recompute_fn

            def under_mode(*args: Any, **named: Any) -> Any:
                with self:
                    return again(*args, **named)

            frame.recompute_fn = under_mode


def _dropout(mode: PerSampleRandom, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    x, p, training, inplace = _arguments(args, named)
    size = mode.whole(tuple(x.shape))
    if not training or p == 0.0 or size is None:
        return func(*args, **named)
    if func in _FEATURES:  # a mask per channel
        size = (*size[:2], *(1 for _ in size[2:]))
    # As torch's own does it, so that the bits are the same.
    noise = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(1 - p).div_(1 - p if p < 1 else 1)
    return x.mul_(mode.part(noise)) if inplace else x * mode.part(noise)


def _arguments(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, float, bool, bool]:
    values = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | {
        "p" if name == "p" else "training" if name == "train" else name: value for name, value in named.items()
    }
    return values["input"], values.get("p", 0.5), values.get("training", True), values.get("inplace", False)


def _drawn_like(mode: PerSampleRandom, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    like = args[0]
    size = mode.whole(tuple(like.shape))
    if size is None:
        return func(*args, **named)
    return mode.part(func(like.new_empty(size), *args[1:], **named))


def _drawn_of_size(
    mode: PerSampleRandom, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    asked = named.pop("size", None) or (args[0] if args and not isinstance(args[0], int) else args)
    size = mode.whole(tuple(asked))
    return mode.part(func(tuple(size), **named)) if size is not None else func(tuple(asked), **named)


def _drawn_in_place(
    mode: PerSampleRandom, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    tensor = args[0]
    size = mode.whole(tuple(tensor.shape))
    if size is None:
        return func(*args, **named)
    with torch.no_grad():
        tensor.copy_(mode.part(func(tensor.new_empty(size), *args[1:], **named)))
    return tensor


def _bernoulli(mode: PerSampleRandom, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    of = args[0]
    size = mode.whole(tuple(of.shape))
    if size is None:
        return func(*args, **named)
    chances = of.new_full(size, 0.5)
    mode.part(chances).copy_(of)
    return mode.part(func(chances, *args[1:], **named))


def _attention(mode: PerSampleRandom, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    values = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | named
    query, key, value = values["query"], values["key"], values["value"]
    p, mask, scale = values.get("dropout_p", 0.0), values.get("attn_mask"), values.get("scale")
    size = mode.whole((*query.shape[:-1], key.shape[-2]))
    if p == 0.0 or size is None:
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
    kept = torch.empty(size, dtype=query.dtype, device=query.device).bernoulli_(1 - p).div_(1 - p if p < 1 else 1)
    return (scores.softmax(-1) * mode.part(kept)) @ value


_FEATURES = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout, *_FEATURES), _dropout),
    **dict.fromkeys((torch.rand_like, torch.randn_like), _drawn_like),
    **dict.fromkeys((torch.rand, torch.randn), _drawn_of_size),
    **dict.fromkeys((Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_), _drawn_in_place),
    torch.bernoulli: _bernoulli,
    F.scaled_dot_product_attention: _attention,
}
