"""What blocks change of arguments that they share, and memory that weights share: a cut would lose it in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.errors import ConfigError

CUT = ParallelConfig(segments=2, blocks="layers")


class Count:
    """An object of the user's."""

    depth = 0


def counts(context: Any) -> float:
    context["depth"] += 1
    return float(context["depth"])


def counts_in_an_array(context: Any) -> float:
    context["array"] += 1
    return float(context["array"][0])


def counts_in_an_object(context: Any) -> float:
    context.depth += 1
    return float(context.depth)


def takes_the_next(context: Any) -> float:
    return float(next(context))


def appends(context: Any) -> float:
    context["seen"].append(torch.ones(1))
    return 1.0


def only_reads(context: Any) -> float:
    return float(context["depth"] + 1)


def scales() -> Iterator[float]:
    return iter([1.0, 2.0, 3.0, 4.0])


def sets_a_number_first(context: Any) -> float:
    return float(context.setdefault("scale", 2.0))


class Layer(nn.Linear):
    def __init__(self, reads: Callable[[Any], float]) -> None:
        super().__init__(4, 4)
        self.reads = reads

    def forward(self, x: Tensor, context: Any) -> Tensor:  # type: ignore[override]
        return x + super().forward(x) * self.reads(context)


class Net(nn.Module):
    """Four layers, which are called with what each forward makes anew."""

    def __init__(self, reads: Callable[[Any], float], makes: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(reads) for _ in range(4))
        self.makes = makes

    def forward(self, x: Tensor) -> Tensor:
        context = self.makes()
        for layer in self.layers:
            x = layer(x, context)
        return x


def made() -> dict[str, Any]:
    return {"depth": 0, "array": np.zeros(1), "seen": []}


@pytest.mark.parametrize(
    ("reads", "makes"),
    [
        (counts, made),
        (counts_in_an_array, made),
        (counts_in_an_object, Count),
        (takes_the_next, scales),
        (appends, made),
        (sets_a_number_first, made),
    ],
)
def test_what_several_blocks_change_of_an_argument_is_refused(
    reads: Callable[[Any], float], makes: Callable[[], Any]
) -> None:
    with pytest.raises(ConfigError, match=r"block 'layers.0' changes 'argument 1', and block 'layers.1' goes on with"):
        Engine(Net(reads, makes).double(), CUT, example={"x": torch.ones(2, 4, dtype=torch.float64)}).close()


class Remembers(nn.Module):
    """Four layers, of which the first one puts a tensor into a dictionary that all are called with."""

    def __init__(self, puts: str) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Remembering(puts, is_first=not k) for k in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory: dict[str, Tensor] = {}
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Remembering(nn.Linear):
    def __init__(self, puts: str, *, is_first: bool) -> None:
        super().__init__(4, 4)
        self.puts, self.is_first = puts, is_first

    def forward(self, x: Tensor, memory: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        found = memory.get("first")
        if self.is_first and self.puts != "nothing":
            memory["first"] = {"input": x, "output": y, "another": 2 * y}[self.puts]
        return y if found is None else y + found


@pytest.mark.parametrize("puts", ["input", "output", "another", "nothing"])
def test_tensors_that_a_block_puts_into_an_argument(puts: str) -> None:
    model, batch = Remembers(puts).double(), {"x": torch.ones(2, 4, dtype=torch.float64)}
    if puts == "nothing":
        Engine(model, CUT, example=batch).close()
        return
    why = "kept in 'argument 1', which 'layers.0' shares" if puts == "input" else "it is no result of that module"
    with pytest.raises(ConfigError, match=why):
        Engine(model, CUT, example=batch).close()


def test_what_they_read_may_be_shared() -> None:
    model = Net(only_reads, made).double()
    batch = {"x": torch.ones(2, 4, dtype=torch.float64)}
    want = model(**batch).sum().item()
    engine = Engine(model, CUT, example=batch)
    assert engine.run([batch], lambda module, inputs: module(**inputs).sum()).item() == pytest.approx(want, rel=1e-12)
    engine.close()


class Shares(nn.Module):
    """Its head's weight lies in its embedding's memory."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        weight = self.embedding.weight
        if way == "view":
            self.head = weight.t()
        elif way == "buffer":
            self.register_buffer("head", weight.data)
        elif way == "part":
            self.head = nn.Parameter(weight.data[:4])
        else:  # parts of one tensor that do not overlap
            both = torch.ones(8, 4)
            self.first, self.second = nn.Parameter(both[:4]), nn.Parameter(both[4:])

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("view", "embedding.weight and head are in the same memory"),
        ("buffer", "embedding.weight and head are in the same memory"),
        ("part", "are in the same memory"),
        ("apart", ""),
    ],
)
def test_weights_in_one_memory(way: str, why: str) -> None:
    def build() -> None:
        Engine(Shares(way), CUT, example={"ids": torch.tensor([[1, 2]])}).close()

    if why:
        with pytest.raises(ConfigError, match=why):
            build()
    else:
        build()


class Writes(nn.Module):
    """Its forward writes to the weight of its embedding."""

    def __init__(self, way: str, *, tied: bool) -> None:
        super().__init__()
        self.way = way
        self.embedding = Padded(8, 4, max_norm=1.0 if way == "max_norm" else None)
        self.embedding.way = way
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        if self.way == "between":
            self.embedding.weight.data.mul_(0.9)
        x: Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Padded(nn.Embedding):
    way: str

    def forward(self, ids: Tensor) -> Tensor:
        if self.way == "padding":
            with torch.no_grad():
                self.weight[0].zero_()
        elif self.way == "decay":
            self.weight.data.mul_(0.9)
        return super().forward(ids)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("way", ["max_norm", "padding", "between", "decay"])
def test_weights_that_a_forward_writes_to(way: str, tied: bool) -> None:
    model, reference = Writes(way, tied=tied).double(), Writes(way, tied=tied).double()
    reference.load_state_dict(model.state_dict())
    batch = {"ids": torch.tensor([[0, 1], [2, 0]])}

    def loss_of(module: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return module(**inputs).square().sum()  # type: ignore[no-any-return]

    def run() -> float:
        engine = Engine(model, CUT, example=batch)
        found = [engine.run([batch], loss_of).item() for _ in range(2)]
        engine.close()
        return found[-1]

    if tied or way in ("between", "decay"):
        why = "the forward of 'embedding' writes to the weight"
        if way != "max_norm" and way != "padding":
            why = "between its modules" if way == "between" else "each forward of 'embedding' changes the weight"
        with pytest.raises(ConfigError, match=why):
            run()
    else:
        want = [loss_of(reference, batch).item() for _ in range(2)][-1]
        assert run() == pytest.approx(want, rel=1e-12)
