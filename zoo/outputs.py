"""judge_outputs(): what comes of a model that returns more than its logits, and of a loss that reads it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zoo.cases import Case
from zoo.inputs import Batch
from zoo.places import configs_of
from zoo.verdict import (
    EXACT,
    UNBUILT,
    Subject,
    Verdict,
    build,
    compared,
    loss_of,
    outcome_of,
    remade,
    train,
    worst,
)

NAMES = ("output_hidden_states", "output_attentions", "output_router_logits")


def judge_outputs(case: Case) -> Verdict:
    """Returns the worst of the verdicts on these ways to train a class, and a reason that names those that are not
    exact:

    - a loss of the user's own reads all tensors that the model returns by itself;
    - hidden states, attentions and router logits, as far as the class has them, are asked for by the batch of a model
      that was recorded without, or by the configuration; and the loss is the model's own, or reads all of these.
    """
    subject, why = build(case)
    if subject is None:
        return Verdict(UNBUILT, why)
    found = {"what it returns unasked": outcome_of(partial(compared, subject, everything))}
    names = [name for name in NAMES if _gives_more(subject, name)]
    found |= _asked(subject, names)
    if any(one.outcome != EXACT for one in found.values()) and len(names) > 1:  # which it is
        found |= {how: one for name in names for how, one in _asked(subject, [name]).items()}
    return worst(found, subject.inputs)


def everything(model: nn.Module, batch: Batch) -> Tensor:
    """Returns a loss that depends on every tensor of what the model returns that has a gradient."""
    found = list(_with_gradient(model(**batch)))
    if not found:
        raise ValueError(f"{type(model).__name__} returned nothing that has a gradient")
    total = found[0].new_zeros(())
    for number, value in enumerate(found):
        weights = torch.linspace(-1.0, 1.0 + number, value.numel(), dtype=value.dtype).reshape(value.shape)
        total = total + (weights * value.clamp(-10.0, 10.0).tanh()).sum()
    return total


def _with_gradient(output: Any) -> Iterator[Tensor]:
    for one in tree_leaves(dict(output) if hasattr(output, "keys") else output):
        if isinstance(one, Tensor) and one.requires_grad and one.dtype.is_floating_point:
            yield one


def _gives_more(subject: Subject, name: str) -> bool:
    """Whether the class returns more tensors when it is asked so, and trains with them."""
    asked = _asking(subject, [name])
    try:
        train(copy.deepcopy(asked.model), asked.batch, everything)
        with torch.enable_grad():
            copies = (replace(one, model=copy.deepcopy(one.model)) for one in (asked, subject))  # some keep states
            more, plain = (list(_with_gradient(one.model(**one.batch))) for one in copies)
    except Exception:  # it has no such output
        return False
    return len(more) > len(plain)


def _asked(subject: Subject, names: list[str]) -> dict[str, Verdict]:
    """Returns the verdict on each way to ask for these outputs."""
    if not names:
        return {}
    words = " and ".join(name.removeprefix("output_").replace("_", " ") for name in names)
    in_batch, in_config = _asking(subject, names), _configured(subject, names)
    plain = replace(in_batch, batch=subject.batch)
    found: dict[str, Verdict] = {}
    for whose, loss in (("the model's own loss", loss_of), ("a loss that reads them", everything)):
        asked = partial(compared, plain, loss, in_batch.batch)
        found[f"{words} asked for in the batch, {whose}"] = outcome_of(asked)
        if in_config is not None:
            found[f"{words} asked for in the configuration, {whose}"] = outcome_of(partial(compared, in_config, loss))
    return found


def _asking(subject: Subject, names: list[str]) -> Subject:
    """Returns the subject with a batch that asks for the outputs."""
    return Subject(_eager(copy.deepcopy(subject.model)), subject.batch | dict.fromkeys(names, True), subject.inputs)


def _configured(subject: Subject, names: list[str]) -> Subject | None:
    """Returns a like model whose configuration asks for the outputs; None for a class that takes none such."""
    model: Any = subject.model
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    for one in configs_of(config):
        for name in names:
            if hasattr(one, name):
                setattr(one, name, True)
    configured = remade(subject, config)
    _eager(configured.model)
    try:
        train(copy.deepcopy(configured.model), subject.batch, loss_of)
    except Exception:
        return None
    return configured


def _eager(model: Any) -> Any:
    if hasattr(model, "set_attn_implementation"):
        with suppress(Exception):  # only this one returns attentions
            model.set_attn_implementation("eager")
    return model
