"""MicroBatch: what goes through the chunks of a rank, from the batch of a replica to the share of its loss."""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fold3d.stage.loss_run import LossRun
from fold3d.stage.replay import Afterwards, Before, DrawnNumbers
from fold3d.tensor_parallel.kept_exchanges import KeptRun
from fold3d.trace.batches import borders_in
from fold3d.trace.wrappers import is_ours

Inputs = dict[str, Any]
"""What the model's forward takes, and perhaps labels, by argument name."""
LossFunction = Callable[[Module, Inputs], Any]
"""(model, inputs) -> a loss, or what an evaluation wants."""
DropoutKey = tuple[int, int, int]
"""(seed, step, number in the global batch): dropout masks depend on it and on the module, never on the layout.
Numbers of what `Engine.forward` runs are negative."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a run; the Executor hands it to each forward, which gives back what it returns."""

    inputs: Inputs
    loss: LossRun
    key: DropoutKey
    drawn: DrawnNumbers = field(default_factory=DrawnNumbers, repr=False, compare=False)
    before: Before = field(default_factory=Before, repr=False, compare=False)
    """Buffers and attributes that forwards have changed, as they were."""
    afterwards: Afterwards = field(default_factory=Afterwards, repr=False, compare=False)
    """What forwards have changed, as it then was, for the loss function."""
    kept: dict[int, KeptRun] = field(default_factory=dict, repr=False, compare=False)
    """Of each chunk that has run and will run again: what it got from other ranks."""
    draws_alone: set[object] = field(default_factory=set, repr=False, compare=False)
    """Who has drawn nothing of others' in a first run, and so must not when it runs again."""
    value: list[Tensor] = field(default_factory=list, repr=False, compare=False)
    """Of the loss, which it gets later, where the last chunk has not run yet."""
    given: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Some values of what the loss function called the model with, by name and shape; the same on all ranks."""
    part: tuple[int, int, int] | None = None
    """(first, end, samples): samples [first, end) of a micro-batch of the user's, whose key it has; None: whole."""
    trains: bool = True
    """Whether a backward follows, for which the result must be a loss."""


def loss_run(function: LossFunction, model: Module, inputs: Inputs, weight: float = 1.0) -> LossRun:
    """Returns a run of `function` with a shallow copy of the inputs: it may take labels out of them.

    What it keeps between its halves is looked for in `function.keeps`, a sequence of objects, else in itself. By
    attributes it says of itself whether it `calls_users_code`, whether it `reads_only_loss` of what the model returns,
    and with what it `sums_losses` to the one that is told.

    Args:
        weight: by which the loss is multiplied.
    """
    own = inspect.unwrap(function)
    keeps = getattr(function, "keeps", None) or (function,)
    is_users = getattr(function, "calls_users_code", not is_ours(own))
    return LossRun(
        lambda: function(model, _shallow_copy(inputs)),
        only_loss=getattr(function, "reads_only_loss", False),
        is_users=is_users,
        keeps=keeps,
        weight=weight,
        sum_of=getattr(function, "sums_losses", torch.sum),
    )


def _shallow_copy(inputs: Mapping[str, Any]) -> Any:
    """Returns a copy that shares no entries: of a UserDict (a BatchEncoding has attributes) one of its class, of other
    mappings, whose copies may share them, a dict."""
    return copy.copy(inputs) if isinstance(inputs, UserDict) else dict(inputs)


def one_number(value: Any) -> None:
    """Checks `value`, a micro-batch's loss in training.

    Raises: TypeError unless it is a tensor with one element, ValueError when no gradient can come of it.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"the loss is a {type(value).__name__}: the loss function must return a tensor")
    if value.numel() != 1:
        raise TypeError(
            f"the loss has shape {list(value.shape)}: it must be one number; let the loss function return a mean or sum"
        )
    if value.is_meta:
        what = getattr(value, "weight", "weights")  # of a MissingTensor
        raise ValueError(
            f"the loss lies on the meta device: it was computed from {what}, which other ranks have; compute it from "
            "what the model returns, or set pp=1 and segments=1"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(
            "the loss has no gradient: it was detached, computed under torch.no_grad(), or does not depend on what the "
            "model returned; or no parameter requires a gradient"
        )


def split_batch(batch: Mapping[str, Any], parts: int) -> list[Inputs]:
    """Returns `parts` micro-batches' inputs: equal slices of dimension 0 of every tensor, other values unchanged.

    Raises: ValueError when a tensor does not divide, or is none of rows.
    """
    borders = borders_in(batch)
    if borders is not None and parts > 1:
        raise ValueError(
            f"batch[{borders!r}] says where packed sequences begin, among all tokens, so dimension 0 does not divide: "
            "make a batch of each micro-batch and call engine.run(micro_batches, loss_fn), or leave it out and give "
            "position_ids that begin at 0 with each sequence"
        )
    for name, value in batch.items():
        if isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] % parts or not value.shape[0]):
            raise ValueError(
                f"batch[{name!r}] has shape {list(value.shape)}: dimension 0 does not divide into "
                f"micro_batches={parts}; change the batch size or micro_batches"
            )
    slices = {name: value.chunk(parts) for name, value in batch.items() if isinstance(value, Tensor)}
    return [{name: slices[name][i] if name in slices else value for name, value in batch.items()} for i in range(parts)]
