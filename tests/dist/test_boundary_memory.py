"""What a chunk sent is given back once it is sent, and the backward through its graph gives the same gradients."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fold3d
from benchmarks.boundary_memory import Boundaries
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

BLOCKS, WIDTH, ROWS, MICRO_BATCHES = 4, 6, 40, 4
KEPT = {"relu", "sigmoid"}
"""Blocks whose backward needs their own result."""


class Block(nn.Module):
    """A layer that hands on its result in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "passed on":  # the very tensor that came, which is a leaf on a later chunk
            return x
        y: Tensor = self.linear(x)
        if self.kind == "relu":
            return torch.relu_(y)
        if self.kind == "sigmoid":
            return torch.sigmoid(y)
        if self.kind == "transposed":
            return y.t().contiguous().t()
        if self.kind == "part":
            return torch.cat([y, y])[:ROWS]
        return y


class Chain(nn.Module):
    """Blocks of a kind; the last one is linear."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(kind if i < BLOCKS - 1 else "linear") for i in range(BLOCKS))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def batches() -> list[dict[str, Tensor]]:
    """Returns the micro-batches of a step."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, MICRO_BATCHES, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return [{"x": x, "y": y} for x, y in zip(rows[0], rows[1], strict=True)]


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Returns a micro-batch's share."""
    value: Tensor = model(**batch) / MICRO_BATCHES
    return value


def engine_of(kind: str, layout: dict[str, Any]) -> fold3d.Engine:
    """Returns an engine for a chain of blocks of this kind."""
    config = fold3d.ParallelConfig(micro_batches=MICRO_BATCHES, blocks="layers", comm_timeout=30.0, **layout)
    return fold3d.Engine(Chain(kind), config, example=batches()[0])


def sent_at_first_backward(kind: str, layout: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Returns this rank's gradients of a step, and the bytes that were alive of what it had sent when its first
    backward began; what is still on its way gets some time to arrive."""
    boundaries, found = Boundaries(), []

    def first(gradient: Tensor) -> None:
        deadline = time.monotonic() + 10
        while not found and boundaries.bytes("sent") > 0 and kind not in KEPT and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(boundaries.bytes("sent"))

    with boundaries.watching():
        engine = engine_of(kind, layout)
        for parameter in engine.owned.values():
            parameter.register_hook(first)
        engine.run(batches(), loss)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in engine.owned.items()}
        engine.close()
    return gradients, found[0] if found else 0


def whole(kind: str) -> dict[str, Tensor]:
    """Returns the gradients that one process computes."""
    model = Chain(kind)
    for batch in batches():
        loss(model, batch).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    ("kind", "recompute"),
    [(kind, False) for kind in ("linear", "relu", "sigmoid", "transposed", "part", "passed on")]
    + [("linear", True), ("relu", True)],
)
def test_what_was_sent_is_given_back(ranks: RankPool, kind: str, recompute: bool) -> None:
    layout = {"pp": 2, "segments": 2, "schedule": "aiao", "recompute": recompute}
    expected = whole(kind)
    for gradients, alive in ranks.run(sent_at_first_backward, 2, kind, layout):
        for name, gradient in gradients.items():
            # What was sent arrives contiguous: only there may a kernel add up in another order.
            bound = 1e-12 if kind == "transposed" else 0.0
            torch.testing.assert_close(gradient, expected[name], rtol=bound, atol=bound / 10, msg=name)
        if kind not in KEPT and kind != "passed on":
            assert alive == 0


# After an exception


RELEASED_S = 5.0
"""Seconds within which threads let go of what they had in their hands."""


class Broken(RuntimeError):
    """What the loss raises."""


class Mark:
    """Lives as long as the graph that it is put on."""


def left_after_an_error(layout: dict[str, Any]) -> tuple[str, list[str], str]:
    """Returns what a step raised, what of it is still alive when nobody holds the exception any more, and what the next
    step says."""
    boundaries, seen = Boundaries(), []

    def bad(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        value = loss(model, batch)
        assert value.grad_fn is not None
        mark = value.grad_fn.metadata["mark"] = Mark()
        seen.append(weakref.ref(mark))
        if len(seen) == MICRO_BATCHES:
            raise Broken("the loss is broken")
        return value

    micro_batches = batches()
    users = [weakref.ref(tensor) for batch in micro_batches for tensor in batch.values()]
    with boundaries.watching():
        engine = engine_of("linear", layout)
        text = ""
        try:
            engine.run(micro_batches, bad)
        except fold3d.RankError as error:
            text = str(error)
        del micro_batches
        until = time.monotonic() + RELEASED_S
        while True:
            gc.collect()
            left = [kind for kind in ("received", "sent") if boundaries.bytes(kind)]
            left += ["graph" for one in seen if one() is not None] + ["batch" for one in users if one() is not None]
            if not left or time.monotonic() > until:
                break
            time.sleep(0.05)
        try:
            engine.run(batches(), loss)
            again = "goes on"
        except fold3d.RankError as error:
            again = str(error)
        engine.close()
    return text, left, again


@pytest.mark.parametrize(("processes", "layout"), [(1, {"segments": 2}), (2, {"pp": 2, "segments": 2}), (2, {"dp": 2})])
def test_nothing_of_a_step_that_raised_is_kept(ranks: RankPool, processes: int, layout: dict[str, Any]) -> None:
    for text, left, again in ranks.run(left_after_an_error, processes, {"schedule": "auto"} | layout):
        assert "Broken: the loss is broken" in text
        assert not left
        assert again == "goes on" if processes == 1 else "stopped at an earlier failure" in again
