"""The loss of Engine.step: how a model's own loss becomes one micro-batch's share of the global loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from fold3d.trace.batches import IGNORED, shifts_labels

LossFunction = Callable[[Module, dict[str, Any]], torch.Tensor]
"""(model, micro-batch) -> this micro-batch's share of the replica's loss, scalar."""


def loss_of(output: Any) -> torch.Tensor:
    """Returns the loss in what a model's forward returned: a tensor, or an object or mapping with `loss`."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the model's forward returned {type(output).__name__} without a loss; it must return a tensor, or an "
            "object or dict with `loss` (HuggingFace models do when the batch has `labels`)"
        )
    return loss


def takes_label_count(model: Module) -> bool:
    """Whether the model divides its loss by a `num_items_in_batch` it is given (HuggingFace models with **kwargs)."""
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.name == "num_items_in_batch" for parameter in parameters):
        return True
    return hasattr(type(model), "loss_function") and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def count_labels(model: Module, micro_batches: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns how many labels the loss is summed over, None when the batches have none.

    Those of `shift_labels` where a batch has them: the model's loss then takes them as they are.
    """
    shifted = shifts_labels(model)
    total = 0
    for batch in micro_batches:
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            return None
        ready = batch.get("shift_labels")
        counted = ready if isinstance(ready, torch.Tensor) else labels[..., 1:] if shifted and labels.ndim else labels
        total += int(counted.ne(IGNORED).sum())
    return total


def mean_share(micro_batches: int) -> LossFunction:
    """Returns the loss function of models whose loss is a mean: every micro-batch counts alike."""
    share = 1.0 / micro_batches
    return lambda model, batch: loss_of(model(**batch)) * share


def share_of(
    model: Module, micro_batches: Sequence[dict[str, Any]], replicas: int, sum_up: Callable[[torch.Tensor], None]
) -> LossFunction:
    """Returns the loss function for a replica's micro-batches of one step; all replicas call.

    Args:
        sum_up: sums a number over the replicas, in place.
    """
    count = count_labels(model, micro_batches) if takes_label_count(model) else None
    if count is None:
        return mean_share(len(micro_batches))
    total = torch.tensor(count)
    sum_up(total)
    return token_share(total, replicas, len(micro_batches))


_LOOKS = ("__get__", "__hash__", "dim", "element_size", "is_contiguous", "is_inference", "numel", "size", "stride")
"""Functions of tensors that tell nothing of their values."""


class Count(torch.Tensor):
    """A number that knows whether anybody calculated with it, or read it; what is calculated are plain tensors.

    Whoever looks at its shape or type only, such as to record the call, has not.
    """

    used = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        looks_only = getattr(func, "__name__", "") in _LOOKS

        def plain(count: Count) -> torch.Tensor:
            count.used = count.used or not looks_only
            with torch._C.DisableTorchFunctionSubclass():
                return count.as_subclass(torch.Tensor)

        args, named = tree_map_only(Count, plain, (args, dict(kwargs or {})))
        return func(*args, **named)


def token_share(labels: torch.Tensor, replicas: int, micro_batches: int) -> LossFunction:
    """Returns the loss function of models that divide their loss by the labels of the global batch.

    A model that takes `num_items_in_batch` and whose loss does not look at it (a regression's, one of its own) has
    returned a mean: its micro-batches count alike.

    Args:
        labels: their number over all replicas, scalar.
        replicas: the mean over them divides by their number again.
        micro_batches: of a replica.
    """

    def share(model: Module, batch: dict[str, Any]) -> torch.Tensor:
        count = labels.as_subclass(Count)
        loss = loss_of(model(**batch, num_items_in_batch=count))
        return loss * replicas if count.used else loss * (1.0 / micro_batches)

    share.adds_up = True  # type: ignore[attr-defined]
    return share
