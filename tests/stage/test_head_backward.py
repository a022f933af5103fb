"""The head's backward follows its forward: the same gradients to the bit, and no logits that wait."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fold3d
from fold3d import _C
from fold3d.schedule import generate, lower

WIDTH, ROWS, MICRO_BATCHES = 8, 16, 4
VOCABULARY = 4096
LAYERS = 4


class Block(nn.Module):
    """A residual block whose router a loss may look at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.scores = torch.zeros(())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        y = self.first(x).relu() * scores[:, :1] + self.second(x).tanh() * scores[:, 1:]
        return x + y, scores


class Model(nn.Module):
    """Embedding, blocks, norm, head; `reads`: what its loss reads beside the logits."""

    def __init__(self, reads: str = "", vocabulary: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reads = reads
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if reads == "tied":
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, scores = layer(x)
        loss = nn.functional.cross_entropy(self.head(self.norm(x)), labels)
        if self.reads == "router":
            loss = loss + 0.1 * (scores * scores).mean()
        if self.reads == "weight":
            loss = loss + 0.1 * self.layers[-1].first.weight.square().sum()
        return loss


def micro_batches(number: int = MICRO_BATCHES, vocabulary: int = 64) -> list[dict[str, Tensor]]:
    """Returns a step's inputs."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(vocabulary, (number, 2, ROWS), generator=generator)
    return [{"ids": ids, "labels": labels} for ids, labels in numbers]


def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Returns a micro-batch's share."""
    value: Tensor = model(**inputs) / MICRO_BATCHES
    return value


def step(
    model: nn.Module, between: Callable[[nn.Module], None] = lambda model: None, **settings: Any
) -> dict[str, Tensor]:
    """Returns the gradients of a step on one process."""
    inputs = micro_batches()
    config = fold3d.ParallelConfig(micro_batches=MICRO_BATCHES, blocks="layers", **settings)
    engine = fold3d.Engine(model, config, example=inputs[0])
    try:
        between(model)
        engine.run(inputs, loss)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    finally:
        engine.close()


def by_hand(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of the same step in a loop of torch's."""
    for inputs in micro_batches():
        loss(model, inputs).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Watch:
    """Counts the heads whose backward has run when the last block's first one begins."""

    def __init__(self, model: nn.Module) -> None:
        self.heads = 0
        self.at_first_body: int | None = None
        model.head.register_forward_hook(self._head)  # type: ignore[union-attr]
        model.layers[-1].second.register_forward_hook(self._body)  # type: ignore[index, union-attr]

    def _head(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._count)  # type: ignore[no-untyped-call]

    def _count(self, gradient: Tensor) -> None:
        self.heads += 1

    def _body(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._first)  # type: ignore[no-untyped-call]

    def _first(self, gradient: Tensor) -> None:
        if self.at_first_body is None:
            self.at_first_body = self.heads


AIAO = {"schedule": "aiao", "segments": 2}


@pytest.mark.parametrize(
    ("reads", "settings", "heads"),
    [
        ("", AIAO, MICRO_BATCHES),
        ("router", AIAO, MICRO_BATCHES),
        ("tied", AIAO, MICRO_BATCHES),  # on another chunk
        ("", {"schedule": "gpipe"}, MICRO_BATCHES),
        ("tied", {"schedule": "gpipe"}, 1),  # head and body share a weight
        ("weight", {"schedule": "gpipe"}, 1),
        ("", {"schedule": "1f1b"}, 1),
        ("", AIAO | {"recompute": "blocks"}, MICRO_BATCHES),
        ("", AIAO | {"recompute": "full"}, 1),
        ("", AIAO | {"offload": "activations"}, MICRO_BATCHES),
        ("router", AIAO | {"offload": "activations"}, MICRO_BATCHES),
    ],
)
def test_same_bits(reads: str, settings: dict[str, Any], heads: int) -> None:
    watches: list[Watch] = []
    found = step(Model(reads), lambda model: watches.append(Watch(model)), **settings)
    assert watches[0].at_first_body == heads
    turned = step(Model(reads), schedule="interleaved", segments=2) if "segments" in settings else None
    turned = turned or step(Model(reads), schedule="1f1b")
    alone = by_hand(Model(reads))
    assert found.keys() == turned.keys() == alone.keys()
    for name, gradient in found.items():
        if reads != "tied":  # of two chunks: schedules add up their micro-batches in different orders
            assert torch.equal(gradient, turned[name]), name
        torch.testing.assert_close(gradient, alone[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "aiao"])
def test_frozen_body(schedule: str) -> None:
    models = [Model(), Model()]
    for model in models:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    found, alone = step(models[0], schedule=schedule, segments=2 if schedule == "aiao" else 1), by_hand(models[1])
    assert found.keys() == alone.keys() == {"head.weight"}
    torch.testing.assert_close(found["head.weight"], alone["head.weight"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("offload", ["none", "activations"])
def test_a_micro_batch_more_takes_no_logits(offload: str) -> None:
    def peak(number: int) -> int:
        inputs = micro_batches(number, VOCABULARY)
        config = fold3d.ParallelConfig(
            micro_batches=number, blocks="layers", schedule="aiao", segments=2, offload=offload
        )
        engine = fold3d.Engine(Model(vocabulary=VOCABULARY), config, example=inputs[0])
        try:
            gc.collect()
            before = _C.live_cpu_bytes()  # of all steps: what a step that ends leaves to a late copy is none of it
            found = []
            for _ in range(5):
                _C.reset_peak_cpu_bytes()
                engine.run(inputs, loss)
                found.append(_C.peak_cpu_bytes() - before)
            return min(found)  # a copy that is late keeps its stash for longer
        finally:
            engine.close()

    logits = ROWS * VOCABULARY * 8
    _C.count_cpu_bytes(True)
    try:
        few, many = peak(4), peak(12)
    finally:
        _C.count_cpu_bytes(False)
    assert many - few < logits / 2  # of eight more


def test_simulated_head_moves_to_the_forward() -> None:
    def simulated(name: str, head: int) -> Any:
        schedule = lower(generate(name, pp=2, segments=1, micro_batches=4), reduce=True)
        model = _C.ClusterModel()
        model.dp, model.bandwidth = 1, 1e9
        model.forward_ns, model.backward_ns = [1000, 1000], [2000, 2500]
        model.activation_bytes, model.layers, model.gradient_bytes = [0, 0], [1, 1], [0, 0]
        model.head_ns = head
        step = _C.simulate_step(schedule, model, 8, True, True)
        return {span.text: span.end_ns - span.start_ns for span in step.spans if span.lane == "compute"}, step.step_ns

    spans, _ = simulated("gpipe", 500)
    assert (spans["1F0"], spans["1B0"], spans["0F0"], spans["0B0"]) == (1500, 2000, 1000, 2000)
    # The last one turns at once.
    assert (spans["1F3"], spans["1B3"]) == (1500, 2000)
    assert simulated("1f1b", 500) == simulated("1f1b", 0)
    with pytest.raises(ValueError, match="head_ns is 2501; it must be part of the 2500 ns"):
        simulated("gpipe", 2501)
