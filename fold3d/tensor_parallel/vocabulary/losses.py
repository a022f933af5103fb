"""Functions along the vocabulary that losses and metrics are made of, computed on parts.

The rest of a loss is arithmetic on numbers per token: the exponentials' sum is combined over ranks from partial ones
as in Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018. So the ranks meet once per loss, where
Megatron's cross-entropy (Shoeybi et al., 2019) meets three times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fold3d.tensor_parallel.vocabulary.column_parallel import ColumnParallel
from fold3d.tensor_parallel.vocabulary.rules import Call, NeedsWhole, Rule, elementwise, functions, over_vocabulary

_AT_ONCE = 1 << 24
"""Elements of what is computed in higher precision, or exponentiated, at a time."""


def statistics(rows: Tensor, index: Tensor | None = None, *, total: bool = False) -> Tensor:
    """Returns [n, 1 to 3] of `rows` [n, columns] of this rank, in fp32 for types of 16 bits, else in their own type.

    Args:
        index: [n], a column of this rank, or -1 for none.
        total: whether the last number is asked for.
    Returns: per row logsumexp; with `index` the element there, or 0; with `total` the sum.
    """
    out: Tensor = _Statistics.apply(rows, index, total)  # type: ignore[no-untyped-call]
    return out


def precise(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which losses are computed, as in torch's kernels."""
    return torch.promote_types(dtype, torch.float32)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor | None, total: bool) -> Tensor:
        found = rows.new_empty((len(rows), 1 + (index is not None) + total), dtype=precise(rows.dtype))
        for some in _slices(rows):
            block = rows[some].to(found.dtype)
            found[some, 0] = block.logsumexp(-1)
            if index is not None:
                at = index[some].unsqueeze(-1)
                found[some, 1] = block.gather(-1, at.clamp(min=0)).masked_fill(at < 0, 0).squeeze(-1)
            if total:
                found[some, -1] = block.sum(-1)
        ctx.total = total
        ctx.save_for_backward(rows, index, found[:, 0].clone())
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows, index, logsumexp = ctx.saved_tensors
        logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, 0)  # exp(-inf - 0), not exp(-inf + inf)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for some in _slices(rows):
            share = out[some] if out.dtype == gradient.dtype else rows.new_empty(rows[some].shape, dtype=gradient.dtype)
            torch.sub(rows[some], logsumexp[some, None], out=share).exp_().mul_(gradient[some, :1])
            if index is not None:
                at = index[some].unsqueeze(-1)
                share.scatter_add_(-1, at.clamp(min=0), gradient[some, 1:2].masked_fill(at < 0, 0))
            if ctx.total:
                share.add_(gradient[some, -1:])
            if out.dtype != gradient.dtype:
                out[some] = share
        return out, None, None


def _slices(rows: Tensor) -> Iterator[slice]:
    step = max(1, _AT_ONCE // max(1, rows.shape[-1]))
    return (slice(at, at + step) for at in range(0, len(rows), step))


def cross_entropy(call: Call) -> Any:
    """`cross_entropy`; of class indices the ranks meet once, with 2 numbers per token (3 where labels are smoothed)."""
    weight, ignore_index, reduction = _common(call)
    smoothing = float(call.argument(7, "label_smoothing", 0.0))
    if _is_of_probabilities(call) and weight is None and not smoothing:
        return _soft_cross_entropy(call, reduction)
    logits, target, _ = _loss_arguments(call)
    if weight is not None:
        if smoothing:
            raise NeedsWhole
        return _mean_of_picked(_log_softmax(logits), target, weight, ignore_index, reduction)
    columns = logits.columns
    rows, labels = _rows(logits, target)
    counted = labels != ignore_index
    index, mine = columns.own(labels.masked_fill(~counted, columns.first))
    found = statistics(rows, index.masked_fill(~mine, -1), total=smoothing > 0)
    everybodys = columns.exchange(found)
    loss = everybodys[..., 0].logsumexp(0) - (1 - smoothing) * everybodys[..., 1].sum(0)
    if smoothing:
        loss = loss - smoothing / columns.size * everybodys[..., 2].sum(0)
    loss = loss.masked_fill(~counted, 0)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / counted.sum()
    return (loss.view(target.shape) if reduction == "none" else loss).to(_type_of(_cross_entropy_of_one, logits))


def nll_loss(call: Call) -> Tensor:
    """`nll_loss` of log-probabilities in parts."""
    logits, target, _ = _loss_arguments(call)
    return _mean_of_picked(logits, target, *_common(call))


def kl_div(call: Call) -> Any:
    """`kl_div` of log-probabilities in parts, and of a target in parts or whole."""
    reduction = call.kwargs.get("reduction", "mean")
    if len(call.args) > 2 or call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None:
        raise NeedsWhole
    each = elementwise(Call(call.function, call.args, {**call.kwargs, "reduction": "none"}))
    if reduction == "none":
        return each
    if reduction == "batchmean":
        return each.sum() / each.shape[0]
    return each.sum() if reduction == "sum" else each.mean()


def log_softmax(call: Call) -> ColumnParallel:
    """`log_softmax` along the vocabulary; in parts."""
    return _log_softmax(_asked(call))


def softmax(call: Call) -> ColumnParallel:
    """`softmax` along the vocabulary; in parts."""
    return _log_softmax(_asked(call), exponential=True)


def logsumexp(call: Call) -> Tensor:
    """`logsumexp` along the vocabulary."""
    logits, along = over_vocabulary(call)
    found = _logsumexp(logits)
    return found.unsqueeze(along) if call.argument(2, "keepdim", False) else found


def gather(call: Call) -> Tensor:
    """`gather` along the vocabulary: each rank gives what it has of what is asked for."""
    logits, along = over_vocabulary(call)
    asked = call.argument(2, "index")
    if not isinstance(asked, Tensor) or call.kwargs.get("sparse_grad"):
        raise NeedsWhole
    index, mine = logits.columns.own(asked)
    found = logits.part().gather(along, index).masked_fill(~mine, 0)
    return logits.columns.add_up(found)


def argmax(call: Call) -> Tensor:
    """`argmax` along the vocabulary: of the ranks' largest, the first of several equal ones."""
    logits, along = over_vocabulary(call)
    values, places = logits.memory().max(along)
    # both are exact in fp64
    mine = torch.stack([values.double(), (places + logits.columns.first).double()], -1)
    everybodys = logits.columns.exchange(mine)
    best = everybodys[..., 0].max(0, keepdim=True).indices
    found = everybodys[..., 1].gather(0, best).squeeze(0).long()
    return found.unsqueeze(along) if call.argument(2, "keepdim", False) else found


def _is_of_probabilities(call: Call) -> bool:
    target = call.argument(1, "target")
    return isinstance(target, Tensor) and target.dtype.is_floating_point


def _soft_cross_entropy(call: Call, reduction: str) -> Any:
    logits, target = call.args[0], call.argument(1, "target")
    ndim = len(logits.shape_of_whole()) if isinstance(logits, ColumnParallel) else 0
    classes = min(1, ndim - 1)
    if not ndim or logits.vocabulary_dim != classes or target.shape != logits.shape:
        raise NeedsWhole
    loss = -(_log_softmax(logits) * target).sum(classes)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _loss_arguments(call: Call) -> tuple[ColumnParallel, Tensor, int]:
    """Returns logits, class indices and the classes' dimension. Raises: NeedsWhole for other ways to call a loss."""
    logits = call.subject()
    target = call.argument(1, "target")
    if not isinstance(target, Tensor) or target.dtype.is_floating_point:
        raise NeedsWhole
    ndim = len(logits.shape_of_whole())
    shape = logits.shape_of_whole()
    classes = 0 if ndim == 1 else 1
    if logits.vocabulary_dim != classes or list(target.shape) != shape[:classes] + shape[classes + 1 :]:
        raise NeedsWhole
    return logits, target, classes


def _common(call: Call) -> tuple[Tensor | None, int, str]:
    """Returns class weights, ignored index and reduction, which stand at the same places in the losses."""
    reduction = call.argument(6, "reduction", "mean")
    legacy = (call.argument(3, "size_average"), call.argument(5, "reduce"))
    if legacy != (None, None) or reduction not in ("none", "mean", "sum"):
        raise NeedsWhole
    return call.argument(2, "weight"), int(call.argument(4, "ignore_index", -100)), reduction


def _rows(logits: ColumnParallel, target: Tensor) -> tuple[Tensor, Tensor]:
    part = logits.part().movedim(logits.vocabulary_dim, -1)
    return part.reshape(-1, part.shape[-1]), target.reshape(-1).long()


def _mean_of_picked(
    logs: ColumnParallel, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    rows, labels = _rows(logs, target)
    counted = labels != ignore_index
    known = labels.masked_fill(~counted, 0)
    index, mine = logs.columns.own(known)
    picked = rows.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
    loss = -logs.columns.add_up(picked)
    scale = torch.ones_like(loss) if weight is None else weight.to(loss.dtype)[known]
    scale = scale.masked_fill(~counted, 0)
    loss = (loss * scale).masked_fill(~counted, 0)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / scale.sum() if reduction == "mean" else loss.sum()


def _logsumexp(logits: ColumnParallel) -> Tensor:
    part = logits.part().movedim(logits.vocabulary_dim, -1)
    found = statistics(part.reshape(-1, part.shape[-1]))
    whole = logits.columns.exchange(found).squeeze(-1).logsumexp(0)
    return whole.view(part.shape[:-1]).to(_type_of(_logsumexp_of_last, logits))


def _asked(call: Call) -> ColumnParallel:
    """Returns the argument of a softmax, in the type that is asked for."""
    logits, _ = over_vocabulary(call)
    dtypes = (one for one in (*call.args, call.kwargs.get("dtype")) if isinstance(one, torch.dtype))
    return _as(logits, next(dtypes, None))


def _log_softmax(logits: ColumnParallel, *, exponential: bool = False) -> ColumnParallel:
    logits = _as(logits, _type_of(_log_softmax_of_last, logits))
    part = logits.part()
    found = logits.columns.share(_logsumexp(_as(logits, precise(part.dtype))))
    result = part - found.unsqueeze(logits.vocabulary_dim)
    return logits.like((result.exp() if exponential else result).to(part.dtype), logits.vocabulary_dim)


def _as(logits: ColumnParallel, dtype: torch.dtype | None) -> ColumnParallel:
    same = dtype is None or dtype == logits.memory().dtype
    return logits if same else logits.like(logits.part().to(dtype), logits.vocabulary_dim)


def _type_of(function: Callable[..., Tensor], logits: ColumnParallel) -> torch.dtype:
    """Returns the type in which torch's `function` of such logits and a number returns: autocast may have its own."""
    memory = logits.memory()
    if not torch.is_autocast_enabled(memory.device.type):
        return memory.dtype
    return function(memory.new_zeros(1, 1), torch.zeros((), dtype=torch.long, device=memory.device)).dtype


def _log_softmax_of_last(rows: Tensor, _: Tensor) -> Tensor:
    return functional.log_softmax(rows, -1)


def _logsumexp_of_last(rows: Tensor, _: Tensor) -> Tensor:
    return rows.logsumexp(-1)


def _cross_entropy_of_one(rows: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(rows, label.view(1))


def rules() -> dict[Any, Rule]:
    """Returns the rules of this file by function."""
    found: dict[Any, Rule] = {functional.cross_entropy: cross_entropy, functional.nll_loss: nll_loss}
    for rule in (kl_div, log_softmax, softmax, logsumexp, gather, argmax):
        found.update(dict.fromkeys(functions(rule.__name__), rule))
    return found
