"""What the model's front and the loss do once per micro-batch, although they run for every chunk."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fold3d
from fold3d import Engine, ParallelConfig
from tests.helpers.ranks import RankPool

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Front(nn.Module):
    """Normalises its inputs without parameters, and keeps a mean and a count of them."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.norm(x - self.mean)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def trained(layout: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses of two steps of three micro-batches, and the state then."""
    torch.manual_seed(0)
    model = Front()
    batch = {"x": torch.randn(12, 4, dtype=torch.float64)}
    engine = Engine(model, ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    losses = [engine.step(batch).loss.item() for _ in range(2)]
    state = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    engine.close()
    return losses, state


@pytest.mark.gate
def test_buffers_in_front_of_the_blocks(ranks: RankPool) -> None:
    losses, state = trained({"segments": 1})
    assert state["count"].item() == 6 and state["norm.num_batches_tracked"].item() == 6
    cut = [trained({"segments": 2}), trained({"segments": 4}), *ranks.run(trained, 2, {"pp": 2, "segments": 2})[:1]]
    for found, buffers in cut:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-12, atol=0.0)
        for name, value in state.items():
            torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-14, msg=name)


class Counts(nn.Module):
    """A layer that counts its runs, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.linear(x / self.runs).tanh()


class Later(nn.Module):
    """Keeps a mean of its inputs in front of its layers, and a count; from the second step on, by a function of its
    own and without the tensor's knowing."""

    mean: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.runs = way, 0
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.write = functools.partial(_written, share=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.way == "in place":
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        elif self.way == "another":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.runs > 3:
            self.write(self, x) if self.way == "elsewhere" else self.mean.data.add_(0.1 * x.detach().mean(0))
        x = x - self.mean
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _written(model: Later, x: Tensor, share: float) -> None:
    model.mean.numpy()[:] += share * x.detach().mean(0).numpy()


def of_what_the_forward_counts(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    out: Tensor = model(**batch)
    return (out - model.mean).square().mean() * model.runs  # type: ignore[operator]


@pytest.mark.parametrize("layout", [{"segments": 2}, {"segments": 4}, {"segments": 2, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("way", ["in place", "another", "data", "elsewhere"])
def test_losses_that_read_what_the_forward_changes(way: str, layout: dict[str, Any]) -> None:
    """The loss of the first micro-batch found what the forwards of later ones had made of it."""

    def trained(**layout: Any) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        model = Later(way)
        batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(3)]
        engine = Engine(model, ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
        losses = []
        for _ in range(3):
            losses.append(engine.run(batches, of_what_the_forward_counts).item())
            assert engine.optimizer is not None
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        mean = model.mean.clone()
        engine.close()
        assert model.runs == 9
        return losses, mean

    torch.testing.assert_close(trained(**layout), trained(), rtol=1e-12, atol=1e-14)


def test_losses_that_change_what_the_forward_changes() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        out: Tensor = model(**batch)
        model.mean.zero_()  # type: ignore[operator]
        return out.square().mean()

    engine = Engine(Later("in place"), ParallelConfig(segments=2, blocks="layers"), optimizer=SGD)
    with pytest.raises(fold3d.Fold3dError, match=r"the loss function changes 'mean' \(of Later\)"):
        engine.run([{"x": torch.ones(4, 4, dtype=torch.float64)}] * 3, loss)
    engine.close()


@dataclass
class Memory:
    """Of a user's."""

    last: Tensor | None = None
    count: int = 0
    more: list[Any] = field(default_factory=list)


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Remembers(nn.Module):
    """Keeps numbers, text, lists and tensors as plain attributes, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.begun = 0, False
        self.seen: list[float] = []
        self.by_size: dict[int, list[int]] = {}
        self.recent: deque[int] = deque([3, 4], maxlen=2)
        self.memory, self.slots = Memory(more=[Memory()]), Slots()
        self.mean, self.total = None, torch.zeros((), dtype=torch.float64)
        self.layers = nn.ModuleList(Counts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.begun = True
        self.made = getattr(self, "made", 0) + 2
        self.seen.append(x.mean().item())
        self.by_size.setdefault(len(x), []).append(self.n)
        self.mean = x.mean() if self.mean is None else 0.9 * self.mean + 0.1 * x.mean()
        self.total += x.mean()
        self.recent.append(self.n)
        self.memory.count += 1
        self.slots.count += 2
        self.memory.more[0].more.append(self.n)
        self.memory.last = x.detach().mean() + (0 if self.memory.last is None else self.memory.last)
        x = (
            x / self.memory.count
            + self.slots.count
            + sum(self.memory.more[0].more)
            + self.memory.last
            + sum(self.recent)
        )
        x = x * self.n + self.mean + self.total + sum(self.seen) + self.made + len(self.by_size[len(x)])
        for layer in self.layers:
            x = layer(x)
        self.last = x  # has a gradient: nothing to count
        return x.square().mean()


def remembered(layout: dict[str, Any]) -> list[Any]:
    """Returns the losses of two steps of three micro-batches, and what the model remembers then."""
    torch.manual_seed(0)
    model = Remembers()
    batch = {"x": torch.randn(12, 4, dtype=torch.float64)}
    engine = Engine(model, ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    losses = [engine.step(batch).loss.item() for _ in range(2)]
    engine.close()
    assert model.mean is not None
    assert model.memory.last is not None
    found = [model.n, model.begun, model.made, model.seen, model.by_size, model.mean.item(), model.total.item()]
    found += [model.memory.count, model.slots.count, model.memory.more[0].more, model.memory.last.item(), model.recent]
    return [losses, *found, [layer.runs for layer in model.layers]]


@pytest.mark.parametrize(
    "layout",
    [
        {"segments": 2},
        {"segments": 4},
        {"segments": 1, "recompute": "full"},
        {"segments": 2, "recompute": "full"},
        {"segments": 2, "recompute": "blocks"},
    ],
    ids=str,
)
def test_plain_attributes(layout: dict[str, Any]) -> None:
    """The count of a model in two segments was 12 for 6 micro-batches, and it computed with the wrong one."""
    alone = remembered({"segments": 1})
    assert alone[1] == 6 and alone[-1] == [6] * 4
    found = remembered(layout)
    assert found[0] == pytest.approx(alone[0], rel=1e-12) and found[1:] == alone[1:]


def test_plain_attributes_in_stages(ranks: RankPool) -> None:
    alone = remembered({"segments": 1})
    for rank, found in enumerate(ranks.run(remembered, 2, {"pp": 2, "segments": 2, "recompute": "full"})):
        assert found[0] == pytest.approx(alone[0], rel=1e-12) and found[1:-1] == alone[1:-1]
        assert found[-1][rank::2] == [6, 6], "its own layers"


class Sometimes(nn.Module):
    """Keeps what only some of its forwards change, or only later ones."""

    mean: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.runs, self.memory = way, 0, Memory(last=torch.zeros(4, dtype=torch.float64))
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.kept = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        new = x.detach().mean(0)
        if self.way == "a number of an object":
            self.memory.count = max(self.memory.count, int(100 * new[0].item()))
        elif self.way == "a tensor of an object" and self.memory.last is not None:
            self.memory.last.mul_(0.5).add_(new)
        elif self.way == "a buffer, in place" and self.runs > 6:
            self.mean.mul_(0.5).add_(new)
        elif self.way == "a tensor, in place" and self.runs > 6:
            self.kept.mul_(0.5).add_(new)
        elif self.way == "another buffer" and self.runs % 2:
            self.mean = 0.5 * self.mean + new
        assert self.memory.last is not None
        x = x - self.mean - self.kept - self.memory.last - 0.01 * self.memory.count
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def of_what_changes_sometimes(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    out: Any = model(**batch)
    one: Any = model
    kept = one.mean.sum() + one.memory.last.sum() + 0.01 * one.memory.count
    return out.square().mean() * (1 + kept)  # type: ignore[no-any-return]


SOMETIMES = [
    *("a number of an object", "a tensor of an object"),
    *("a buffer, in place", "a tensor, in place", "another buffer"),
]


def changed_sometimes(way: str, layout: dict[str, Any]) -> list[float]:
    """Returns the losses of four steps of three micro-batches."""
    torch.manual_seed(0)
    engine = Engine(Sometimes(way), ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    losses = []
    for _ in range(4):
        batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(3)]
        losses.append(engine.run(batches, of_what_changes_sometimes).item())
        assert engine.optimizer is not None
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    engine.close()
    return losses


@pytest.mark.parametrize("way", SOMETIMES)
def test_what_only_some_micro_batches_change(ranks: RankPool, way: str) -> None:
    """Later runs of a micro-batch, and its loss, found what others had made of a value that it did not change itself,
    and the first that wrote to a tensor wrote again for each chunk."""
    alone = changed_sometimes(way, {"segments": 1})
    for recompute in ("none", "full"):
        layout = {"segments": 2, "recompute": recompute}
        assert changed_sometimes(way, layout) == pytest.approx(alone, rel=1e-12)
        assert ranks.run(changed_sometimes, 2, way, {"pp": 2, **layout}) == [pytest.approx(alone, rel=1e-12)] * 2


def test_large_tensors_that_are_written_to_later() -> None:
    class Large(Sometimes):
        def __init__(self) -> None:
            super().__init__("")
            self.register_buffer("table", torch.zeros(1 << 20, 2))

        def forward(self, x: Tensor) -> Tensor:
            if self.runs > 2:
                self.get_buffer("table")[0] += 1
            return super().forward(x).square().mean()

    engine = Engine(Large(), ParallelConfig(segments=2, micro_batches=2, blocks="layers"), optimizer=SGD)
    batch = {"x": torch.ones(4, 4, dtype=torch.float64)}
    engine.step(batch)
    with pytest.raises(fold3d.Fold3dError, match=r"forward writes to 'table' \(of Large\)"):
        for _ in range(2):
            engine.step(batch)
    engine.close()


class Moments(NamedTuple):
    count: int
    mean: Tensor


@dataclass(frozen=True)
class Settings:
    scale: float = 1.0


class Mode(Enum):
    FIRST = 1.0
    SECOND = 2.0


class Tally(Counter[int]):
    pass


class OtherKinds(nn.Module):
    """Keeps values of many kinds in front of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.moments, self.settings, self.mode = Moments(0, torch.zeros(4, dtype=torch.float64)), Settings(), Mode.FIRST
        self.counts, self.number, self.array = Tally(), np.float64(1.0), np.zeros(4)
        self.draws, self.numpy_draws = random.Random(1), np.random.default_rng(1)
        self.old_draws, self.torch_draws = np.random.RandomState(1), torch.Generator().manual_seed(1)
        self.same_draws = self.torch_draws
        self.steps, self.scales = itertools.count(1), iter((1.0, 0.5, 2.0) * 9)
        self.places, self.shifts = iter(range(100)), iter([0.1 * n for n in range(100)])
        self.averages: dict[str, Any] = defaultdict(dict)
        self.log: list[float] = []
        self.same_log = self.log

    def forward(self, x: Tensor, way: str) -> Tensor:
        new, one = x.detach().mean(0), x.detach().mean().item()
        scale, shift = 1.0, torch.zeros(4, dtype=torch.float64)
        if way == "named tuple":
            self.moments = Moments(self.moments.count + 1, 0.5 * self.moments.mean + new)
            scale, shift = self.moments.count, self.moments.mean
        elif way == "frozen dataclass":
            self.settings = replace(self.settings, scale=self.settings.scale + one)
            scale = self.settings.scale
        elif way == "enum":
            self.mode = Mode.SECOND if self.mode is Mode.FIRST else Mode.FIRST
            scale = self.mode.value
        elif way == "counter":
            self.counts[int(one > 0)] += 1
            scale = 1 + self.counts[1] / self.counts.total()
        elif way == "numpy":
            self.number = 0.5 * self.number + np.float64(one)
            self.array *= 0.5
            self.array += self.number
            shift = torch.from_numpy(self.array.copy())
        elif way == "generators":
            scale = self.draws.random() + float(self.numpy_draws.random()) + self.old_draws.randn()
            shift = torch.rand(4, generator=self.torch_draws, dtype=torch.float64)
            shift = shift * torch.rand(4, generator=self.same_draws, dtype=torch.float64)
        elif way == "iterators":
            scale = next(self.scales) / next(self.steps) + next(self.places)
            shift = shift + next(self.shifts)
        elif way == "tensors in containers":
            average = self.averages["all"].setdefault("mean", torch.zeros(4, dtype=torch.float64))
            shift = average.lerp_(new, 0.3).clone()
        elif way == "shared list":
            self.log.append(one)
            scale = sum(self.same_log)
        x = scale * x - shift
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def with_other_kinds(way: str, layout: dict[str, Any]) -> list[float]:
    """Returns the losses of three steps of four micro-batches."""
    torch.manual_seed(0)
    engine = Engine(OtherKinds(), ParallelConfig(micro_batches=4, blocks="layers", **layout), optimizer=SGD)
    losses = [engine.step({"x": torch.randn(16, 4, dtype=torch.float64), "way": way}).loss.item() for _ in range(3)]
    engine.close()
    return losses


@pytest.mark.parametrize(
    "way",
    [
        *("named tuple", "frozen dataclass", "enum", "counter", "numpy", "generators", "iterators"),
        *("tensors in containers", "shared list"),
    ],
)
def test_values_of_other_kinds(ranks: RankPool, way: str) -> None:
    """They changed once per chunk."""
    alone = with_other_kinds(way, {"segments": 1})
    for recompute in ("none", "full"):
        layout = {"segments": 2, "recompute": recompute}
        assert with_other_kinds(way, layout) == pytest.approx(alone, rel=1e-12)
    assert ranks.run(with_other_kinds, 2, way, {"pp": 2, **layout}) == [pytest.approx(alone, rel=1e-12)] * 2


class Stateful(nn.Module):
    """Counts its runs where fold3d does not follow it, or where it does; `way` says where."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.memory: Memory | None = None
        self.memories: dict[int, Memory] = {}
        self.count = counting() if way == "closure" else functools.partial(counted, state={"count": 0})
        self.last: Memory | None = None
        numbers = [1.0, 2.0, 3.0]
        makers = {
            "cycle": itertools.cycle,
            "map": lambda all: map(float, all * 9),
            "reversed": lambda all: reversed(all * 9),
        }
        self.draws: Iterator[float] | None = makers[way](numbers) if way in makers else None

    def forward(self, x: Tensor) -> Tensor:
        if self.way in ("closure", "partial"):
            x = x / self.count()
        elif self.way == "iterator made each time":
            self.draws = map(float, (2, 3, 4))
            x = x / next(self.draws)
        elif self.way == "global iterator":
            x = x / next(GLOBAL_DRAWS)
        elif self.way in ("cycle", "map", "reversed", "generator"):
            self.draws = self.draws or (1.0 + n for n in range(100))
            x = x / next(self.draws)
        elif self.way == "made late":
            self.memory = self.memory or Memory()
            self.memory.count += 1
            x = x / self.memory.count
        elif self.way == "made late, in a dictionary":
            memory = self.memories.setdefault(len(x), Memory())
            memory.count += 1
            x = x / memory.count
        elif self.way == "made each time":
            self.last = Memory(count=2)
            x = x / self.last.count
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def with_state(way: str, layout: dict[str, Any]) -> list[float]:
    """Returns the losses of two steps of three micro-batches."""
    torch.manual_seed(0)
    engine = Engine(Stateful(way), ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    try:
        return [engine.step({"x": torch.randn(12, 4, dtype=torch.float64)}).loss.item() for _ in range(2)]
    finally:
        engine.close()


GLOBAL_DRAWS = itertools.cycle([1.0, 2.0, 3.0])


def counting() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


def counted(state: dict[str, int]) -> int:
    state["count"] += 1
    return state["count"]


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("closure", r"the model's forward changes 'count' \(variable of counting"),
        ("partial", r"the model's forward changes 'count' \(entry of an argument"),
        ("made late", r"a forward of the model has made 'memory' \(of class Memory\)"),
        ("made late, in a dictionary", r"a forward of the model has made 'memories\[4\]' \(of class Memory\)"),
        ("made each time", ""),
        ("iterator made each time", ""),
        ("global iterator", r"the model's forward changes 'GLOBAL_DRAWS'"),
        *((kind, rf"takes the next of 'draws' \(of Stateful\), a {kind}") for kind in ("cycle", "map", "generator")),
        ("reversed", r"takes the next of 'draws' \(of Stateful\), a list_reverseiterator"),
    ],
)
def test_state_that_is_not_followed_is_refused(way: str, says: str) -> None:
    """It was counted once per chunk."""

    whole = with_state(way, {})
    if says:
        with pytest.raises(fold3d.Fold3dError, match=says):
            with_state(way, {"segments": 2})
    else:
        assert with_state(way, {"segments": 2}) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("way", ["cycle", "map", "reversed", "generator"])
def test_each_process_has_iterators_of_its_own(ranks: RankPool, way: str) -> None:
    """Where it runs the forward once with a micro-batch, there is nothing to put back."""
    assert ranks.run(with_state, 2, way, {"pp": 2}) == [pytest.approx(with_state(way, {}), rel=1e-12)] * 2


class Prepares(nn.Module):
    """Registers its hooks when it first runs, as transformers' models do when hidden states are first asked for."""

    def __init__(self, flag: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.runs = 0
        if flag != "absent":
            self.is_ready = flag

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "is_ready", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda layer, given, result: 1.5 * result)
            self.is_ready = True
        self.runs += 1
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean() / self.runs


@pytest.mark.parametrize("layout", [{"segments": 2}, {"segments": 4}, {"segments": 2, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("flag", ["absent", False, None])
def test_hooks_that_a_forward_registers(layout: dict[str, Any], flag: Any) -> None:
    def trained(**layout: Any) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        model = Prepares(flag)
        batch = {"x": torch.randn(12, 4, dtype=torch.float64)}
        engine = Engine(model, ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
        losses = [engine.step(batch).loss.item() for _ in range(2)]
        engine.close()
        assert all(len(layer._forward_hooks) == 1 for layer in model.layers) and model.runs == 6
        return losses, model.layers[0].weight.detach()

    torch.testing.assert_close(trained(**layout), trained(), rtol=1e-12, atol=0.0)


class Chain(nn.Module):
    """A chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def changes_in_place(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    batch["y"] -= 1
    return (model(x=batch["x"]) - batch["y"]).square().mean()


def in_place(layout: dict[str, int]) -> float | str:
    """Returns the loss of a step whose loss function changes its labels, or the error."""
    torch.manual_seed(0)
    engine = Engine(Chain(), ParallelConfig(micro_batches=1, blocks="layers", **layout))
    try:
        loss = engine.run([{"x": torch.ones(2, 4), "y": torch.ones(2, 4)}], changes_in_place).item()
        engine.close()
        return loss
    except (fold3d.Fold3dError, RuntimeError) as error:
        return str(error)


def test_micro_batches_changed_in_place(ranks: RankPool) -> None:
    """They were changed again for every chunk, and once more to find out how the model is called."""
    right = in_place({"segments": 1})
    assert isinstance(right, float)
    assert ranks.run(in_place, 2, {"pp": 2}) == pytest.approx([right] * 2)
    assert in_place({"segments": 2}) == pytest.approx(right)


def draws(layout: dict[str, int]) -> tuple[float, float, float]:
    """Returns the loss of a step whose loss function draws from Python and numpy, and their next numbers."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        x = batch["x"] * (random.random() + np.random.rand())
        return random.random() * model(x=x).square().mean()

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(0)
    engine = Engine(Chain(), ParallelConfig(micro_batches=2, blocks="layers", **layout))
    value = engine.run([{"x": torch.ones(2, 4)}] * 2, loss).item()
    engine.close()
    return value, random.random(), np.random.rand()


@pytest.mark.gate
def test_random_numbers_of_python_and_numpy(ranks: RankPool) -> None:
    """Chunks drew one after the other, and so did finding out how the model is called."""
    alone = draws({"segments": 1})
    for found in (draws({"segments": 2}), draws({"segments": 4}), *ranks.run(draws, 2, {"pp": 2, "segments": 2})):
        assert found == pytest.approx(alone, rel=1e-6)
        assert found[1:] == alone[1:]


class NormalNumbers(Chain):
    """Draws one normal number in front of its layers: numpy makes two, and the second waits without a trace in the
    generator's words."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * np.random.standard_normal()).square().mean()


def normal_numbers(layout: dict[str, Any]) -> tuple[list[float], float]:
    """Returns the losses of three steps of three micro-batches, and numpy's next normal number."""
    np.random.seed(1)
    torch.manual_seed(0)
    engine = Engine(NormalNumbers(), ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    losses = [engine.step({"x": torch.ones(3, 4)}).loss.item() for _ in range(3)]
    engine.close()
    return losses, float(np.random.standard_normal())


@pytest.mark.parametrize("layout", [{"segments": 4}, {"segments": 2, "recompute": "full"}])
def test_normal_numbers_of_numpy(layout: dict[str, Any]) -> None:
    losses, following = normal_numbers({"segments": 1})
    assert normal_numbers(layout) == (pytest.approx(losses, rel=1e-6), following)


class Normalises(nn.Module):
    """A layer that divides by a running mean, which each forward changes in one of many ways."""

    run: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls = way, 0
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        if way == "attribute, later":
            self.run = torch.ones(4, dtype=torch.float64)
        else:
            self.register_buffer("run", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        new = 0.9 * self.run + 0.1 * x.detach().abs().mean(0)
        self.calls += 1
        if self.way == "data in place" or (self.way in ("data in place, later", "attribute, later") and self.calls > 3):
            self.run.data.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
        elif self.way == "data":
            self.run.data = new
        elif self.way == "in place" or (self.way == "in place, later" and self.calls > 3):
            self.run.copy_(new)
        elif self.way == "another":
            self.run = new
        return x / self.run


class Stack(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normalises(way) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def stacked(way: str, layout: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses of three steps of three micro-batches, and the state then."""
    torch.manual_seed(0)
    model = Stack(way)
    buffers = dict(model.named_buffers())
    engine = Engine(model, ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    losses = [engine.step({"x": torch.randn(12, 4, dtype=torch.float64)}).loss.item() for _ in range(3)]
    state = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    engine.close()
    if way == "data in place":
        assert all(one is buffers[name] for name, one in model.named_buffers()), "others may know the tensor"
    return losses, state


@pytest.mark.parametrize(
    "way",
    [
        *("data in place", "data in place, later", "attribute, later"),
        *("data", "in place", "in place, later", "another"),
    ],
)
def test_buffers_that_backward_reads(way: str) -> None:
    """A micro-batch's backward found in them what the forwards of later ones had written."""
    torch.testing.assert_close(stacked(way, {"segments": 2}), stacked(way, {"segments": 1}), rtol=1e-12, atol=1e-14)


def test_buffers_that_backward_reads_in_stages(ranks: RankPool) -> None:
    for way in ("data in place", "in place"):
        found, alone = ranks.run(stacked, 2, way, {"pp": 2})[0], stacked(way, {"segments": 1})
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)


TABLE: dict[int, float] = {}
COUNT = {"n": 0}
NUMBER, READY = 0, False
CONTEXT: ContextVar[int] = ContextVar("CONTEXT", default=0)
OF_THE_THREAD = threading.local()


class Totals:
    number = 0


class Shares(nn.Module):
    """Keeps what it does in global variables, or in its class."""

    total = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        global NUMBER, READY
        if self.where == "an entry":
            COUNT["n"] += 1
        elif self.where == "a number":
            NUMBER += 1
        elif self.where == "a class":
            Shares.total += 1
        elif self.where == "another class":
            Totals.number += 1
        elif self.where == "a context variable":
            CONTEXT.set(CONTEXT.get() + 1)
        elif self.where == "a thread's own":
            OF_THE_THREAD.count += 1
        elif self.where == "a table":
            x = x * TABLE.setdefault(len(x), 1.5)
        elif self.where == "a flag":
            READY = True
        return self.linear(x)


class Sharing(Stack):
    def __init__(self, where: str) -> None:
        super().__init__("")
        self.layers = nn.ModuleList(Shares(where) for _ in range(4))


@pytest.mark.parametrize(
    ("where", "what"),
    [
        *(("an entry", "'COUNT'"), ("a number", "'NUMBER'"), ("a class", "'total'"), ("another class", "'number'")),
        *(("a context variable", "'CONTEXT'"), ("a thread's own", "'count'"), ("a table", ""), ("a flag", "")),
    ],
)
def test_what_forwards_count_elsewhere(where: str, what: str) -> None:
    """Chunks run in another order than one process's blocks, so that they found other numbers there."""
    TABLE.clear()
    OF_THE_THREAD.count = 0
    engine = Engine(Sharing(where), ParallelConfig(segments=2, micro_batches=2, blocks="layers"), optimizer=SGD)
    batch = {"x": torch.ones(4, 4, dtype=torch.float64)}
    try:
        if what:
            with pytest.raises(fold3d.Fold3dError, match=f"forward changes {what}"):
                engine.step(batch)
        else:
            engine.step(batch)
            engine.step(batch)
    finally:
        engine.close()


class Depth:
    """What blocks have in common."""

    def __init__(self) -> None:
        self.blocks, self.seen = 0, [0]
        self.table: dict[int, Tensor] = {}
        self.is_ready, self.scale = False, None


class Deep(nn.Module):
    """A block that computes with what it finds in an object, or in a module, that others have, too."""

    def __init__(self, way: str, depth: Any) -> None:
        super().__init__()
        self.way, self.depth = way, depth
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "counts":
            self.depth.blocks += 1
        elif self.way == "appends":
            self.depth.seen.append(len(self.depth.seen))
        elif self.way == "makes once":
            self.depth.is_ready = True
            self.depth.table.setdefault(len(x), torch.ones(4, dtype=torch.float64))
            self.depth.scale = self.depth.scale or 1.0
        elif self.way == "adds to a list":
            self.depth.append(1)
        elif self.way == "adds to a dictionary":
            self.depth["blocks"] = self.depth.get("blocks", 0) + 1
        number = len(self.depth) + self.depth.get("blocks", 0) if isinstance(self.depth, dict) else 0
        number += len(self.depth) if isinstance(self.depth, list) else 0
        number += self.depth.blocks + len(self.depth.seen) if isinstance(self.depth, (Depth, Counting)) else 0
        return self.linear(x) / (1 + number)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.seen = 0, [0]


class Depths(Stack):
    def __init__(self, way: str, depth: Any) -> None:
        super().__init__("")
        self.layers = nn.ModuleList(Deep(way, depth) for _ in range(4))
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.depth, (list, dict)):
            self.depth.clear()
        else:
            self.depth.blocks, self.depth.seen = 0, [0]
        return super().forward(x)


@pytest.mark.parametrize(
    ("way", "kind", "what"),
    [
        ("counts", Depth, "changes 'Depth.blocks', and block 'layers.1' goes on with it"),
        ("appends", Depth, "changes 'Depth.seen', and block 'layers.1' goes on with it"),
        ("counts", Counting, "changes 'Counting.blocks', and block 'layers.1' goes on with it"),
        ("adds to a list", list, "changes 'depth', and block 'layers.1' goes on with it"),
        ("adds to a dictionary", dict, "changes 'depth', and block 'layers.1' goes on with it"),
        ("makes once", Depth, ""),
    ],
)
def test_what_blocks_have_in_common(way: str, kind: type[Any], what: str) -> None:
    """Blocks of a later chunk found what was there before those of the chunks in front."""

    def losses(segments: int) -> list[float]:
        torch.manual_seed(0)
        config = ParallelConfig(segments=segments, micro_batches=2, blocks="layers")
        with contextlib.closing(Engine(Depths(way, kind()), config, optimizer=SGD)) as engine:
            return [engine.step({"x": torch.ones(4, 4, dtype=torch.float64)}).loss.item() for _ in range(2)]

    alone = losses(1)
    if what:
        with pytest.raises(fold3d.Fold3dError, match=what):
            losses(2)
    else:
        assert losses(2) == pytest.approx(alone, rel=1e-12)


class Momentum(nn.Module):
    """Keeps a mean of its inputs in a weight that is not trained, as encoders of keys do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.key = nn.Linear(4, 4, dtype=torch.float64).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.key.weight
        if self.way == "in place":
            with torch.no_grad():
                weight.mul_(0.9).add_(0.1 * x.mean())
        elif self.way == "other data":
            weight.data = 0.9 * weight.data + 0.1 * x.mean()
        elif self.way == "unseen":
            weight.data.mul_(0.9).add_(0.1 * x.mean())
        x = x + self.key(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("way", ["in place", "other data", "unseen"])
def test_weights_that_a_forward_writes_to(way: str) -> None:
    """With two segments it was written to twice for each micro-batch, and losses were 6 % off."""
    batch = {"x": torch.ones(4, 4, dtype=torch.float64)}
    for segments in (1, 2):
        config = ParallelConfig(segments=segments, micro_batches=2, blocks="layers")
        with contextlib.closing(Engine(Momentum(way), config, optimizer=SGD)) as engine:
            if segments == 1:
                engine.step(batch)
            else:
                recorded = r"forward writes to the weight 'key\.weight' between its modules"
                found = r"forward writes to 'key\.weight', a weight that is not"
                with pytest.raises(fold3d.Fold3dError, match=found if way == "other data" else recorded):
                    engine.step(batch)


class HalfFrozen(nn.Module):
    """Trains its last two layers; a hook has what the last one before them returns require a gradient, as
    `enable_input_require_grads` of transformers does for embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.layers[:2].requires_grad_(False)
        self.layers[1].register_forward_hook(self.require)

    @staticmethod
    def require(module: nn.Module, given: Any, made: Tensor) -> None:
        made.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def half_frozen(layout: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    config = ParallelConfig(micro_batches=2, blocks="layers", **layout)
    with contextlib.closing(Engine(HalfFrozen(), config, optimizer=SGD)) as engine:
        return [engine.step({"x": torch.randn(4, 4, dtype=torch.float64)}).loss.item() for _ in range(3)]


@pytest.mark.parametrize("layout", [{"segments": 2}, {"segments": 2, "recompute": "full"}, {"pp": 2}])
def test_a_hook_that_has_a_border_s_tensor_require_a_gradient(ranks: RankPool, layout: dict[str, Any]) -> None:
    """It runs in the chunk behind, and the one before got a gradient that it did not expect."""
    found = ranks.run(half_frozen, layout.get("pp", 1), layout)
    assert found == [pytest.approx(half_frozen({}), rel=1e-12)] * len(found)


class Behind(nn.Module):
    """Counts behind its layers, where it reads the count, too; `way`: or in front of them."""

    count: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))
        self.register_buffer("count", torch.ones((), dtype=torch.float64))
        self.state: Tensor | None = None
        self.runs = 0
        self.mems = [torch.zeros(4, dtype=torch.float64)]
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.pair: tuple[Tensor, ...] = ()
        self.sizes: list[int] = []
        self.cache: dict[str, Any] = {"scale": 2.0}
        self.by_run: dict[int, Tensor] = {}
        self.memory, self.another, self.slots = Memory(), Memory(), Slots()
        self.memories = {1: [Memory()]}
        self.nested = {"sizes": [[0]], "names": [["x"]]}

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_front(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.at_the_end(x)

    def in_front(self, x: Tensor) -> Tensor:
        if self.way == "empties in front":
            self.mems.clear()
            self.sizes[:] = [3]
            self.cache["first"] = x.detach().mean(0) * self.cache["scale"]
            self.memory.last = x.detach().mean(0)
            x = x + self.cache["first"] / self.sizes[0] + len(self.mems)
            return x + self.memory.last + len(self.nested["names"][0])
        return READS[self.way][1](self, x) if self.way in READS else x

    def at_the_end(self, x: Tensor) -> Tensor:
        self.state = x.detach().mean(0)
        self.mems.append(self.state)
        self.recent.append(self.state)
        self.pair = (self.state, *self.pair[:1])
        self.sizes.append(len(self.mems))
        self.cache["last"] = self.state
        self.by_run[self.runs + 1] = self.state
        self.runs += 1
        self.memory.last = self.memories[1][0].last = self.state
        self.memory.count += 1
        self.memories[1][0].count += 1
        self.slots.count += 1
        self.memory.more.append(1)
        self.nested["sizes"][0].append(1)
        self.another = Memory(count=self.runs)
        self.count = self.count + 1 if self.way == "another" else self.count.add_(1)
        return x.square().mean() * self.count.log()


READS: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "reads a buffer in front": ("count", lambda m, x: x / m.count),
    "reads an attribute in front": ("state", lambda m, x: x if m.state is None else x + m.state),
    "reads a number in front": ("runs", lambda m, x: x / (1 + m.runs)),
    "reads a list in front": ("mems", lambda m, x: x + sum(m.mems)),
    "stacks a list in front": ("mems", lambda m, x: x + torch.stack(m.mems).sum(0)),
    "counts a list in front": ("mems", lambda m, x: x / (1 + len(m.mems))),
    "reads a queue in front": ("recent", lambda m, x: x + sum(m.recent)),
    "reads a tuple in front": ("pair", lambda m, x: x + sum(m.pair)),
    "reads numbers in front": ("sizes", lambda m, x: x / (1 + sum(m.sizes))),
    "asks for an entry in front": ("cache", lambda m, x: x + m.cache["last"] if "last" in m.cache else x),
    "reads other entries in front": ("by_run", lambda m, x: x + m.by_run.get(m.runs, 0.0)),
    "reads nested numbers in front": ("nested", lambda m, x: x / (1 + sum(m.nested["sizes"][0]))),
    "reads a tensor of an object": ("memory.last", lambda m, x: x if m.memory.last is None else x + m.memory.last),
    "reads a number of an object": ("memory.count", lambda m, x: x / (1 + m.memory.count)),
    "reads a list of an object": ("memory.more", lambda m, x: x / (1 + len(m.memory.more))),
    "reads an object in a list": ("memories[1][0].count", lambda m, x: x / (1 + m.memories[1][0].count)),
    "reads another object": ("another", lambda m, x: x / (1 + m.another.count)),
    "reads a slot": ("slots.count", lambda m, x: x / (1 + m.slots.count)),
}
"""What is read in front, under which name the error has it, and how."""


def trained_behind(layout: dict[str, int], way: str) -> tuple[list[float], Tensor]:
    """Returns the losses of steps of three micro-batches, before and after a state is loaded, and the count then."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 4, dtype=torch.float64)}
    engine = Engine(Behind(way), ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    losses = [engine.step(batch).loss.item() for _ in range(3)]
    state = engine.state_dict()
    state["model"]["count"] += 10
    engine.load_state_dict(state)
    losses += [engine.step(batch).loss.item() for _ in range(2)]
    count = engine.state_dict()["model"]["count"].clone()
    engine.close()
    return losses, count


@pytest.mark.parametrize("way", ["in place", "another", "empties in front"])
def test_buffers_that_are_changed_behind_the_blocks(ranks: RankPool, way: str) -> None:
    """They were changed once per step in one process, and stage 0 saved its own, which never changed. Containers
    that the next micro-batch empties, and what it finds of its own in them, are as in a model that is not cut."""
    want, count = trained_behind({"segments": 1}, way)
    assert count.item() == 26
    for layout in ({"segments": 2}, {"pp": 2}, {"pp": 2, "segments": 2}):
        for losses, found in ranks.run(trained_behind, layout.get("pp", 1), layout, way):
            torch.testing.assert_close(losses, want, rtol=1e-12, atol=0.0)
            assert found == count


class LaterBehind(Behind):
    """Changes its buffer behind the layers where the batch has rows for that."""

    def at_the_end(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        if more is not None:
            self.count += 1
        return x.square().mean()

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.at_the_end(x, more)


def trained_behind_later(layout: dict[str, int]) -> float:
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 4, dtype=torch.float64)}
    engine = Engine(LaterBehind(""), ParallelConfig(micro_batches=3, blocks="layers", **layout), optimizer=SGD)
    try:
        engine.step(batch)
        engine.step({**batch, "more": torch.ones(12)})
        return float(engine.state_dict()["model"]["count"])
    finally:
        engine.close()


def refused_later(layout: dict[str, int]) -> str:
    with pytest.raises(fold3d.Fold3dError) as error:
        trained_behind_later(layout)
    return str(error.value)


def test_buffers_that_only_a_later_form_changes_behind_the_blocks(ranks: RankPool) -> None:
    """Stage 0 saved its own."""
    assert trained_behind_later({"segments": 2}) == 4
    for text in ranks.run(refused_later, 2, {"pp": 2}):
        assert "it changes the buffer 'count' behind the blocks" in text, text


def refused_behind(layout: dict[str, int], way: str) -> str:
    """Returns with which error a training ends."""
    with pytest.raises(fold3d.Fold3dError) as error:
        trained_behind(layout, way)
    return str(error.value)


@pytest.mark.parametrize("way", READS)
def test_what_one_micro_batch_leaves_to_the_next_behind_the_blocks(ranks: RankPool, way: str) -> None:
    name = READS[way][0]
    for layout in ({"segments": 2}, {"pp": 2}):
        for text in ranks.run(refused_behind, layout.get("pp", 1), layout, way):
            assert f"the model's forward reads '{name}' in front of its blocks" in text and "step 1" in text, text
