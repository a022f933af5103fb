"""Random loss functions of users' kinds, trained on one process by torch alone and by fold3d on any layout."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig

from fold3d import Engine, ParallelConfig
from fold3d.errors import Fold3dError
from tests.helpers.models import build

VOCABULARY = 32
ROWS, LENGTH = 4, 6
MICRO_BATCHES, STEPS = 2, 2
RATE = 0.5


@dataclass(frozen=True)
class Kind:
    """What a loss is made of."""

    reduction: str
    """"sum", "mean" (over samples), "tokens", "weighed" (over class weights), "mask" (over a mask of its own)."""
    key: str
    """Name of the labels."""
    ignores: int
    """Labels of padding."""
    temperature: float
    coupled: str
    """A term over the batch: "", "variance", "contrast"."""
    warms_up: bool
    """That term counts nothing in the first step."""
    in_place: str
    """Labels are changed in place: "", "before" or "behind" the model's call."""
    counts: bool
    """It is weighed by a counter of calls."""
    corrupts: bool
    """Inputs are corrupted by a generator of its own."""


def kind_of(seed: int) -> Kind:
    """Returns one of many kinds."""
    draw = random.Random(seed)
    coupled = draw.choice(["", "", "variance", "contrast"])
    return Kind(
        reduction=draw.choice(["sum", "mean", "tokens", "weighed", "mask"]),
        key=draw.choice(["labels", "targets"]),
        ignores=draw.choice([-100, -1]),
        temperature=draw.choice([1.0, 0.7]),
        coupled=coupled,
        warms_up=bool(coupled) and draw.random() < 0.5,
        in_place=draw.choice(["", "", "before", "behind"]),
        counts=draw.random() < 0.3,
        corrupts=draw.random() < 0.3,
    )


class Loss:
    """The share of a micro-batch: what `kind` says, fp64, scalar."""

    def __init__(self, kind: Kind, micro_batches: int) -> None:
        self.kind, self.share = kind, 1.0 / micro_batches
        self.calls = 0
        self.generator = np.random.default_rng(5)
        self.weights = torch.linspace(0.1, 3.0, VOCABULARY, dtype=torch.float64)

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        kind = self.kind
        self.calls += 1
        ids, labels = batch["input_ids"], batch.pop(kind.key)
        if kind.corrupts:
            ids = torch.where(torch.from_numpy(self.generator.random(ids.shape)) < 0.2, 0, ids)
        if kind.in_place == "before":
            labels[:, 0] = kind.ignores
        output = model(input_ids=ids, attention_mask=batch["attention_mask"])
        if kind.in_place == "behind":
            labels[:, 0] = kind.ignores
        logits = output["logits"] / kind.temperature
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=kind.ignores)
        losses, counted = losses.view(labels.shape), labels.ne(kind.ignores)
        if kind.reduction == "sum":
            loss = losses.sum()
        elif kind.reduction == "mean":
            loss = losses.sum(1).mean()
        elif kind.reduction == "tokens":
            loss = losses.sum() / counted.sum()
        elif kind.reduction == "weighed":
            weights = self.weights[labels.clamp(min=0)] * counted
            loss = (losses * weights).sum() / weights.sum()
        else:
            mask = batch["attention_mask"].double()
            loss = (losses * mask).sum() / mask.sum()
        pooled = logits.mean(1)
        if kind.coupled == "contrast":
            term = F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))
        else:
            term = pooled.var(0, unbiased=False).sum()
        if kind.coupled:
            loss = loss + term * (0.0 if kind.warms_up and self.calls <= MICRO_BATCHES else 0.3)
        return loss * self.share * (1.0 + 0.1 * self.calls if kind.counts else 1.0)


def batches(seed: int, kind: Kind) -> list[list[dict[str, Tensor]]]:
    """Returns the micro-batches of each step: rows of different lengths, padded on the right."""
    made = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(STEPS):
        step = []
        for _ in range(MICRO_BATCHES):
            ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=made)
            lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=made)
            mask = (torch.arange(LENGTH) < lengths).long()
            labels = torch.where(mask.bool(), ids.roll(-1, 1), kind.ignores)
            step.append({"input_ids": ids, "attention_mask": mask, kind.key: labels})
        steps.append(step)
    return steps


def model_of(seed: int) -> nn.Module:
    """Returns a model of four layers, fp64."""
    size = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
    if seed % 2:
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = GPT2Config(n_embd=16, n_layer=4, n_head=4, n_positions=16, **size, **none)
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=4, **heads, **size)
    return build(config, seed=seed, dtype=torch.float64)


Found = tuple[list[float], dict[str, Tensor]]
"""Losses, and the weights in the end."""


def alone(seed: int, replicas: int) -> Found:
    """Trains by torch alone; replica r has micro-batches r, r + replicas ... and a loss object of its own."""
    kind = kind_of(seed)
    model = model_of(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    functions = [Loss(kind, MICRO_BATCHES // replicas) for _ in range(replicas)]
    losses = []
    for step in batches(seed, kind):
        optimizer.zero_grad()
        total = 0.0
        for number, batch in enumerate(step):
            loss = functions[number % replicas](model, dict(batch)) / replicas
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def on_layout(seed: int, layout: dict[str, Any]) -> Found | str:
    """Trains with fold3d; returns why it refuses, if it does before the first step is taken."""
    kind, model = kind_of(seed), model_of(seed)
    torch.set_default_dtype(torch.float64)  # of the losses that are returned
    try:
        engine = Engine(
            model, ParallelConfig(**layout), optimizer=lambda own: torch.optim.SGD(own, lr=RATE), max_grad_norm=None
        )
        dp, replica = engine.topology.dp, engine.topology.dp_rank
        function = Loss(kind, MICRO_BATCHES // dp)
        losses: list[float] = []
        try:
            for step in batches(seed, kind):
                loss = engine.run(step[replica::dp], function)
                assert engine.optimizer is not None
                losses.append(engine._built().step.mean_loss(loss).item())
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            weights = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
            return losses, weights
        except Fold3dError as error:
            if losses:  # it was found out too late
                raise
            return str(error)
        finally:
            engine.close()
    finally:
        torch.set_default_dtype(torch.float32)


def train(seeds: list[int], layout: dict[str, Any]) -> list[Found | str]:
    """Returns what becomes of each loss on this layout."""
    found = []
    for seed in seeds:
        mine = dict(layout)
        if mine.get("micro_batch_size"):
            kind = kind_of(seed)
            says = {"sum": "sum", "mean": "mean"}.get(kind.reduction)
            if says and not kind.coupled:
                mine["loss_reduction"] = says
        found.append(on_layout(seed, mine))
    return found
