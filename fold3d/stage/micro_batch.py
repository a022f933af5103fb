"""MicroBatch: what travels through the chunks of a rank, from the batch of a replica to the share of its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module

from fold3d.stage.once.changed_buffers import Before
from fold3d.stage.once.drawn_numbers import DrawnNumbers
from fold3d.tensor_parallel.kept.kept_run import KeptRun

Inputs = dict[str, Any]
"""What the model's forward takes, and perhaps labels, by argument name."""
ModelCall = Callable[[Module, Inputs], Any]
"""(model, inputs) -> a loss, or what an evaluation wants; runs on every chunk."""
DropoutKey = tuple[int, int, int]
"""(seed, step, number in the global batch): dropout masks depend on it and on the module, never on the layout."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a run; the Executor hands it to each forward, which gives back what it returns."""

    inputs: Inputs
    call: ModelCall
    key: DropoutKey | None
    """None in an evaluation, which leaves the generators alone."""
    drawn: DrawnNumbers = field(default_factory=DrawnNumbers, repr=False, compare=False)
    before: Before = field(default_factory=dict, repr=False, compare=False)
    """Buffers that forwards have changed, as they were."""
    kept: dict[int, KeptRun] = field(default_factory=dict, repr=False, compare=False)
    """Of each chunk that has run and will run again: what it got from other ranks."""
    part: tuple[int, int, int] | None = None
    """(first, end, samples): samples [first, end) of a micro-batch of the user's, whose key it has; None: whole."""
    compares: bool = False
    """Whether it runs only to be compared, with masks as in training."""

    @property
    def trains(self) -> bool:
        """Whether a backward follows, for which the result must be a loss."""
        return self.key is not None and not self.compares

    @property
    def only_loss(self) -> bool:
        """Whether `call` reads nothing but the loss of what the model returns, as its attribute of that name says."""
        return reads_only_loss(self.call)

    def run(self, model: Module) -> Any:
        """Calls what is to be called, with a shallow copy: a loss function may take labels out of its inputs, and
        every chunk needs them."""
        return self.call(model, dict(self.inputs))


def reads_only_loss(call: ModelCall) -> bool:
    """Returns whether `call` has said of itself, by an attribute, that of what the model returns it reads the loss
    alone."""
    return getattr(call, "reads_only_loss", False)


def one_number(value: Any) -> None:
    """Checks `value`, a micro-batch's loss in training.

    Raises: TypeError unless it is a tensor with one element, ValueError when no gradient can come of it.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the loss is a {type(value).__name__}: the loss function must return a tensor")
    if value.numel() != 1:
        raise TypeError(
            f"the loss has shape {list(value.shape)}: it must be one number; let the loss function return a mean or sum"
        )
    if value.is_meta:
        raise ValueError(
            "the loss lies on the meta device: it was computed from weights that are not on this rank; compute it from "
            "what the model returns, or set pp=1"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(
            "the loss has no gradient: it was detached, computed under torch.no_grad(), or does not depend on what the "
            "model returned; or no parameter requires a gradient"
        )


def split_batch(batch: Mapping[str, Any], parts: int) -> list[Inputs]:
    """Returns `parts` micro-batches' inputs: equal slices of dimension 0 of every tensor, other values unchanged.

    Raises: ValueError when a tensor does not divide.
    """
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and (value.ndim == 0 or value.shape[0] % parts or not value.shape[0]):
            raise ValueError(
                f"batch[{name!r}] has shape {list(value.shape)}: dimension 0 does not divide into "
                f"micro_batches={parts}; change the batch size or micro_batches"
            )
    slices = {name: value.chunk(parts) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return [{name: slices[name][i] if name in slices else value for name, value in batch.items()} for i in range(parts)]
