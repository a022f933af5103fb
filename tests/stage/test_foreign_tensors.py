"""What a loss function reads of the inside of a model that is cut, by hooks and attributes: right, or an error."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.errors import RankError
from fold3d.stage.loss_reads import ForeignTensors
from fold3d.trace.capture import trace
from fold3d.trace.coat import Coat
from tests.helpers.ranks import RankPool

SGD = functools.partial(torch.optim.SGD, lr=0.1)
X = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).reshape(2, 4)
CUT = [(1, {"segments": 2}), (2, {"pp": 2}), (2, {"pp": 2, "segments": 2})]
IDS = ["segments=2", "pp=2", "both"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept: Tensor | None = None
        self.keeps = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).tanh()
        if self.keeps:
            self.kept = hidden.square().mean()
        return x + hidden


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.last(x)
        return out


class Script:
    """Keeps what modules return, and uses it for the loss, a log, or not at all."""

    def __init__(self, model: Net, modules: list[str], use: str) -> None:
        self.seen: dict[str, Tensor] = {}
        self.logged: list[float] = []
        self.calls = 0
        self.use = use
        for name in modules:
            model.get_submodule(name).register_forward_hook(functools.partial(self.hook, name))

    def hook(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.use == "log":
            self.logged.append(output.detach().norm().item())
        elif self.use in ("derived", "copy"):
            self.seen[name] = output.tanh() if self.use == "derived" else output.detach().clone()
        elif self.use == "detached":
            self.seen[name] = output.detach()
        elif self.use != "nothing":
            self.seen[name] = output

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        out = model(batch["x"])
        loss = out.square().mean()
        if bool(loss.isnan()):
            raise ValueError("not a number")
        chosen = out[batch["x"] > 0].square().sum()
        if self.use in ("log", "nothing", "keep"):
            return loss + chosen
        if self.use == "number":
            return loss + sum(one.square().mean().item() for one in self.seen.values())
        if self.use == "masked":
            return loss + sum(one[one > 0].square().sum() for one in self.seen.values())
        return loss + sum(one.square().mean() for one in self.seen.values())


def train(layout: dict[str, int], modules: list[str], use: str) -> tuple[list[float], list[int]]:
    """Returns the losses of two steps and how often the script's functions ran."""
    torch.manual_seed(0)
    model = Net().double()
    script = Script(model, modules, use)
    engine = Engine(model, ParallelConfig(blocks="layers", **layout), optimizer=SGD, example={"x": X})
    assert engine.optimizer is not None
    losses = []
    for _ in range(2):
        losses.append(engine.run([{"x": X}], script.loss).item())
        engine.optimizer.step()
    engine.close()
    assert all(type(one) is Tensor for one in script.seen.values())
    return losses, [script.calls, len(script.logged)]


KEPT = [["layers.0"], ["layers.0.inner"], ["layers.1.inner", "layers.3.inner"], ["first"]]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("processes", "layout"), CUT, ids=IDS)
@pytest.mark.parametrize("modules", KEPT, ids=["block", "inside", "several", "embedding"])
def test_kept_for_the_loss(ranks: RankPool, processes: int, layout: dict[str, int], modules: list[str]) -> None:
    for use in ("add", "detached", "number", "masked", "derived", "copy"):
        for text in ranks.run(refused, processes, layout, modules, use):
            read = f"the loss function reads what a hook of {modules[0]} keeps"
            assert read in text or f"a hook of {modules[0]} keeps a tensor, and the loss function, which" in text
            assert "Set pp=1 and segments=1" in text


def refused(layout: dict[str, int], modules: list[str], use: str) -> str:
    with pytest.raises(RankError) as error:
        train(layout, modules, use)
    return str(error.value)


@pytest.mark.parametrize("modules", KEPT, ids=["block", "inside", "several", "embedding"])
def test_a_model_in_one_piece_gives_it(modules: list[str]) -> None:
    assert train({}, modules, "add")[0] != train({}, modules, "nothing")[0]


@pytest.mark.parametrize(("processes", "layout"), CUT, ids=IDS)
@pytest.mark.parametrize(
    ("modules", "use"),
    [
        (["layers.0", "layers.3"], "nothing"),
        (["layers.0.inner", "layers.3.inner", "first"], "log"),
        (["layers.3.inner"], "keep"),
        (["layers.3"], "add"),
        (["layers.3", "last"], "derived"),
        (["layers.3.inner", "last"], "masked"),
    ],
)
def test_no_false_alarm(ranks: RankPool, processes: int, layout: dict[str, int], modules: list[str], use: str) -> None:
    """Hooks that only look, and what the last chunk has; a loss function runs once per micro-batch."""
    expected, (_, logged) = train({}, modules, use)
    chunks = layout.get("segments", 1)
    for losses, (calls, numbers) in ranks.run(train, processes, layout, modules, use):
        assert losses == pytest.approx(expected, rel=1e-14)
        assert calls == 2
        assert numbers <= logged * chunks


def attributes(layout: dict[str, int], numbers: list[int]) -> float:
    torch.manual_seed(0)
    model = Net().double()
    for number in numbers:
        model.layers[number].keeps = True  # type: ignore[union-attr]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        total = model(batch["x"]).square().mean()
        for number in numbers:
            total = total + model.get_submodule(f"layers.{number}").kept
        assert isinstance(total, Tensor)
        return total

    engine = Engine(model, ParallelConfig(blocks="layers", **layout), optimizer=SGD, example={"x": X})
    found = engine.run([{"x": X}], loss).item()
    engine.close()
    return found


def test_attributes_of_modules() -> None:
    assert attributes({"segments": 2}, [3]) == pytest.approx(attributes({}, [3]), rel=1e-14)
    with pytest.raises(RankError, match=r"what the attribute layers\.1\.kept keeps, which other ranks have"):
        attributes({"segments": 2}, [1, 3])


def test_hooks_that_come_later_and_evaluation() -> None:
    torch.manual_seed(0)
    model = Net().double()
    engine = Engine(model, ParallelConfig(blocks="layers", segments=2), optimizer=SGD, example={"x": X})
    plain = engine.forward({"x": X}, lambda model, batch: model(**batch).mean())
    script = Script(model, ["layers.0"], "add")
    with pytest.raises(RankError, match=r"a hook of layers\.0"):
        engine.forward({"x": X}, script.loss)
    script.use = "nothing"
    assert engine.forward({"x": X}, lambda model, batch: model(**batch).mean()) == plain
    engine.close()


class Collecting(Net):
    """Its own hooks collect what its layers return, for its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(functools.partial(self.collect, number))

    def collect(self, number: int, module: nn.Module, args: Any, output: Tensor) -> None:
        self.found[number] = output

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + sum(one.square().mean() for one in self.found.values())


def collected(layers: tuple[int, ...], segments: int) -> float:
    """The loss of the second step."""
    torch.manual_seed(0)
    model = Collecting().double()
    for number, layer in enumerate(model.layers):
        if number not in layers:
            layer._forward_hooks.clear()
    engine = Engine(model, ParallelConfig(segments=segments, blocks="layers"), optimizer=SGD)
    try:
        engine.run([{"x": X}], lambda module, batch: module(**batch).square().mean())
        assert engine.optimizer is not None
        engine.optimizer.zero_grad()
        return engine.run([{"x": X}], lambda module, batch: module(**batch).square().mean()).item()
    finally:
        engine.close()


def test_what_the_models_own_hooks_collect() -> None:
    """Of layers of the last chunk it is there."""
    assert collected((3,), 2) == pytest.approx(collected((3,), 1), rel=1e-12)
    for layers in ((0,), (0, 1, 2, 3)):
        with pytest.raises(RankError, match=r"the model's forward reads what a hook of layers\.\d keeps"):
            collected(layers, 2)


def test_only_hooked_modules_have_something_else_than_nan() -> None:
    model = Net()
    with Coat() as coat:
        foreign = ForeignTensors(
            coat, model, trace(model, blocks="layers", example={"x": X.float()}), computes_loss=True
        )
        assert math.isnan(foreign.fill("first"))
        handle = model.last.register_forward_hook(lambda *_: None)
        assert math.isnan(foreign.fill("first")) and foreign.fill("first", "last") == 0.0
        handle.remove()
        model.first.register_forward_hook(lambda *_: None)
        assert foreign.fill("first") == 0.0 and math.isnan(foreign.fill("last"))
