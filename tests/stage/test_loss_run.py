"""LossRun: a loss function runs once per micro-batch on each rank, in its own modes, however the model is cut."""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fold3d import Engine, ParallelConfig
from fold3d.errors import Fold3dError, RankError, SplitError
from fold3d.stage.loss_run import LossRun, running_loss
from tests.helpers.ranks import RankPool

CPU = torch.device("cpu")
SGD = functools.partial(torch.optim.SGD, lr=0.1)
CUT = [(1, {"segments": 2}), (2, {"pp": 2}), (2, {"pp": 2, "segments": 2}), (2, {"dp": 2}), (2, {"tp": 2})]
IDS = ["segments=2", "pp=2", "both", "dp=2", "tp=2"]
MICRO_BATCHES = 4


class Net(nn.Module):
    """Four layers behind an embedding of numbers, and a head; fp64 [rows, 4] -> [rows, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x) * scale
        out: Tensor = self.last(x)
        return out


def micro_batches(replica: int = 0, replicas: int = 1) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    x = torch.randn(MICRO_BATCHES, 2, 4, dtype=torch.float64)
    return [{"x": x[i], "target": x[-1 - i]} for i in range(replica, MICRO_BATCHES, replicas)]


class Loss:
    """What a script's loss does besides: counts, draws, keeps, switches modes."""

    def __init__(self) -> None:
        self.calls = 0
        self.behind = 0
        self.generator = np.random.default_rng(3)
        self.torch_generator = torch.Generator().manual_seed(4)
        self.weight = 0.0
        self.shapes: list[int] = []
        self.total = torch.zeros((), dtype=torch.float64)
        self.seen = 0.0

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        self.calls += 1
        self.weight = 1.0 + self.generator.random() + random.random()
        self.shapes.append(self.calls)
        self.total += self.weight
        keep = torch.rand(batch["x"].shape, generator=self.torch_generator) > 0.2
        target = batch.pop("target")
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            out = model(batch["x"] * keep)
        self.behind += 1
        self.seen = float(self.total)
        with torch.no_grad():
            importance = out.detach().square().sum(1, keepdim=True)
        assert len(self.shapes) == self.calls
        return ((out - target).square() * importance).mean() * self.weight * self.shapes[-1] * self.seen


def trained(layout: dict[str, int], steps: int = 2, rank: int = 0) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Returns losses, weights and what the loss function has counted."""
    torch.manual_seed(0)
    random.seed(2)
    model, loss = Net().double(), Loss()
    engine = Engine(model, ParallelConfig(blocks="layers", micro_batches=MICRO_BATCHES, **layout), optimizer=SGD)
    losses = []
    for _ in range(steps):
        mine = micro_batches(engine.topology.dp_rank, engine.topology.dp)
        losses.append(engine.run(mine, loss).item())
        assert engine.optimizer is not None
        engine.optimizer.step()
    state = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    last = engine.topology.has_loss
    engine.close()
    return losses, state, [loss.calls, loss.shapes, float(loss.total), loss.behind if last else loss.calls]


@pytest.mark.gate(cases=3)
@pytest.mark.parametrize(("processes", "layout"), CUT[:3] + CUT[4:], ids=IDS[:3] + IDS[4:])
def test_state_of_the_loss_is_that_of_one_process(ranks: RankPool, processes: int, layout: dict[str, int]) -> None:
    losses, state, counted = trained({"segments": 1})
    assert counted[0] == 2 * MICRO_BATCHES
    for found, weights, numbers in ranks.run(trained, processes, layout):
        assert found == pytest.approx(losses, rel=1e-12)
        assert numbers == pytest.approx(counted) if not isinstance(numbers[1], list) else numbers == counted
        for name, value in weights.items():
            torch.testing.assert_close(value, state[name], rtol=1e-12, atol=1e-13, msg=name)


def test_replicas_run_it_as_often_as_the_stock_loop(ranks: RankPool) -> None:
    for _, _, counted in ranks.run(trained, 2, {"dp": 2}):
        assert counted[0] == MICRO_BATCHES, "half of the micro-batches, twice"


def stepped(layout: dict[str, int], function: Callable[[nn.Module, dict[str, Any]], Any]) -> float:
    torch.manual_seed(0)
    engine = Engine(Net().double(), ParallelConfig(blocks="layers", **layout))
    try:
        return engine.run(micro_batches(), function).item()
    finally:
        engine.close()


class Modes:
    """Enters a mode around the call, and sees whether its own are on before and behind it."""

    def __init__(self, enter: Callable[[], Any], is_on: Callable[[], Any]) -> None:
        self.enter, self.is_on = enter, is_on
        self.found: list[Any] = []

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        with self.enter():
            before = self.is_on()
            out = model(batch["x"])
            self.found.append((before, self.is_on()))
        return out.double().square().mean()


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


ENTERED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    "function": (Function, torch._C._len_torch_function_stack),
    "dispatch": (Dispatch, torch._C._len_torch_dispatch_stack),
}


@pytest.mark.parametrize("mode", ENTERED)
def test_modes_rest_with_it(mode: str) -> None:
    """Four micro-batches are under way at the same time; outside nothing of their modes is left."""
    enter, is_on = ENTERED[mode]
    outside = is_on()
    plain, cut = Modes(enter, is_on), Modes(enter, is_on)
    expected, found = stepped({"segments": 1}, plain), stepped({"segments": 2, "schedule": "aiao"}, cut)  # type: ignore[dict-item]
    assert found == expected
    assert cut.found == plain.found and len(cut.found) == MICRO_BATCHES and all(before for before, _ in cut.found)
    assert is_on() == outside


def test_a_context_variable_is_its_own() -> None:
    variable = contextvars.ContextVar("number", default=0)

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        variable.set(variable.get() + 1)
        mine = variable.get()
        out: Tensor = model(batch["x"])
        assert variable.get() == mine
        return out.square().mean()

    variable.set(5)
    stepped({"segments": 2}, loss)
    assert variable.get() == 5


def calls_again(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        first = model(batch["x"])
    out: Tensor = model(batch["x"])
    return (out - first * 0.5).square().mean()


def calls_nothing(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return torch.zeros((), dtype=torch.float64, requires_grad=True)


def uses_a_part(model: Any, batch: dict[str, Any]) -> Tensor:
    hidden = model.first(batch["x"])
    for layer in model.layers:
        hidden = hidden + layer(hidden)
    out: Tensor = model.last(hidden)
    return out.square().mean()


def embeds_by_itself(model: Any, batch: dict[str, Any]) -> Tensor:
    out: Tensor = model(batch["x"] + model.first(batch["x"]))
    return out.square().mean()


def heads_by_itself(model: Any, batch: dict[str, Any]) -> Tensor:
    out: Tensor = model.last(model(batch["x"]))
    return out.square().mean()


ODD = {
    calls_again: "calls the model a second time",
    calls_nothing: "returned without calling the model",
    uses_a_part: "or called parts of it by themselves",
    embeds_by_itself: "uses a part of the model by itself",
    heads_by_itself: "uses a part of the model by itself",
}


def refused(layout: dict[str, int], name: str) -> str:
    function = next(one for one in ODD if one.__name__ == name)
    with pytest.raises(Fold3dError) as error:
        stepped(layout, function)
    return str(error.value)


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("function", ODD, ids=lambda one: one.__name__)
@pytest.mark.parametrize(("processes", "layout"), CUT[:2], ids=IDS[:2])
def test_what_a_cut_model_cannot_do_is_refused_with_its_name(
    ranks: RankPool, processes: int, layout: dict[str, int], function: Callable[..., Tensor]
) -> None:
    for text in ranks.run(refused, processes, layout, function.__name__):
        assert ODD[function] in text and "set pp=1 and segments=1" in text, text


def plainly(function: Callable[..., Tensor]) -> float:
    torch.manual_seed(0)
    model = Net().double()
    return sum(function(model, dict(batch)).item() for batch in micro_batches())


def one_step(layout: dict[str, int], name: str) -> float:
    return stepped(layout, next(one for one in ODD if one.__name__ == name))


@pytest.mark.parametrize("function", [one for one in ODD if one is not calls_nothing], ids=lambda one: one.__name__)
def test_a_model_in_one_piece_does_it(ranks: RankPool, function: Callable[..., Tensor]) -> None:
    expected = plainly(function)
    assert stepped({"segments": 1}, function) == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_handles_an_error_of_the_model() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        try:
            out = model(batch["x"][:, :3])
        except RuntimeError:
            out = model(batch["x"])
        return torch.as_tensor(out).square().mean()

    expected = plainly(lambda model, batch: model(batch["x"]).square().mean())
    assert stepped({"segments": 1}, loss) == pytest.approx(expected, rel=1e-6)


def test_an_error_of_the_loss_is_its_own() -> None:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        model(batch["x"])
        raise ZeroDivisionError("mine")

    with pytest.raises(RankError, match="ZeroDivisionError: mine"):
        stepped({"segments": 2}, loss)
    assert running_loss() is None and torch.is_grad_enabled()


def test_letting_go_ends_context_managers_and_runs_nothing_else() -> None:
    model, ended = Net(), list[str]()

    def function() -> Tensor:
        try:
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.zeros(1, 4))
            ended.append("behind")
        finally:
            ended.append("ended")
        raise AssertionError

    loss = LossRun(function)
    loss.begin(model, [""], CPU, None)
    assert loss.call is not None and not ended and not torch.is_autocast_enabled("cpu")
    with loss.inside() as call:
        assert torch.is_autocast_enabled("cpu") and call.args[0].shape == (1, 4)
    loss.let_go()
    assert ended == ["ended"] and loss.is_over and not torch.is_autocast_enabled("cpu")
    assert "forward" not in vars(model)


def test_nothing_is_kept_of_it() -> None:
    model = Net()
    batch = torch.zeros(1, 4)
    gone = weakref.ref(batch)
    loss = LossRun(functools.partial(model, batch))
    loss.begin(model, [""], CPU, None)
    result = loss.end(torch.ones(1))
    assert result.item() == 1
    gc.disable()
    try:
        del loss, batch
        assert gone() is None
    finally:
        gc.enable()


def test_a_copy_of_the_model_that_the_loss_makes_is_whole() -> None:
    model, copies = Net(), list[nn.Module]()

    def function() -> Tensor:
        copies.append(copy.deepcopy(model))
        out: Tensor = copies[0](torch.ones(1, 4)) + model(torch.ones(1, 4))
        return out

    loss = LossRun(function)
    loss.begin(model, [""], CPU, None)
    assert loss.call is not None
    result = loss.end(torch.zeros(1, 4))
    assert torch.equal(result, copies[0](torch.ones(1, 4))) and torch.equal(result, model(torch.ones(1, 4)))


def test_a_value_set_on_both_sides_is_refused() -> None:
    class Both:
        count = 0

        def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
            self.count += 1
            out: Tensor = model(batch["x"])
            self.count += 1
            return out.square().mean() * self.count

    stepped({"segments": 1}, Both())
    with pytest.raises(RankError, match=r"sets 'count' \(attribute of Both\) before and behind the model's call"):
        stepped({"segments": 2, "schedule": "aiao"}, Both())  # type: ignore[dict-item]


class Running:
    """Divides by a mean of the losses before, which is kept for the next micro-batch behind the model's call."""

    def __init__(self, *, reads_in_front: bool) -> None:
        self.reads_in_front = reads_in_front

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        scale = getattr(self, "mean", 1.0) if self.reads_in_front else 0.0
        loss: Tensor = model(batch["x"]).square().mean()
        scale = scale or getattr(self, "mean", 1.0)
        self.mean = 0.5 * scale + 0.5 * loss.item()
        return loss / scale


def test_what_is_kept_for_the_next_micro_batch_is_read_behind_the_call() -> None:
    expected = stepped({"segments": 1}, Running(reads_in_front=True))
    aiao = {"segments": 2, "schedule": "aiao"}
    assert stepped(aiao, Running(reads_in_front=False)) == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"reads 'mean' \(attribute of Running\) in front of the model's call"):
        stepped(aiao, Running(reads_in_front=True))  # type: ignore[arg-type]


MEAN = 1.0


def mean_of(loss: Tensor, mean: float) -> float:
    return 0.5 * mean + 0.5 * loss.item()


def in_a_global(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    global MEAN
    scale = MEAN
    loss: Tensor = model(batch["x"]).square().mean()
    MEAN = mean_of(loss, MEAN)
    return loss / scale


def scale_of_now() -> float:
    return MEAN


def in_a_global_of_another(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    global MEAN
    scale = scale_of_now()
    loss: Tensor = model(batch["x"]).square().mean()
    MEAN = mean_of(loss, MEAN)
    return loss / scale


def around_a_function() -> Callable[[nn.Module, dict[str, Any]], Tensor]:
    mean = 1.0

    def function(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        nonlocal mean
        scale = mean
        loss: Tensor = model(batch["x"]).square().mean()
        mean = mean_of(loss, scale)
        return loss / scale

    return function


def around_a_function_behind() -> Callable[[nn.Module, dict[str, Any]], Tensor]:
    mean = 1.0

    def function(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        nonlocal mean
        loss: Tensor = model(batch["x"]).square().mean()
        scale = mean
        mean = mean_of(loss, scale)
        return loss / scale

    return function


def in_the_model(model: Any, batch: dict[str, Any]) -> Tensor:
    scale = getattr(model, "mean", 1.0)
    loss: Tensor = model(batch["x"]).square().mean()
    model.mean = mean_of(loss, scale)
    return loss / scale


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (in_a_global, r"'MEAN' \(variable of in_a_global\)"),
        (in_a_global_of_another, r"'MEAN' \(variable of scale_of_now\)"),
        (around_a_function(), r"'mean' \(variable of around_a_function.<locals>.function\)"),
        (in_the_model, r"'mean' \(attribute of \w+\)"),
    ],
)
def test_what_is_read_in_front_and_changed_behind_is_refused_wherever_it_is_kept(
    function: Callable[..., Tensor], name: str
) -> None:
    with pytest.raises(RankError, match=rf"reads {name} in front of the model's call"):
        stepped({"segments": 2, "schedule": "aiao"}, function)  # type: ignore[dict-item]


def test_a_variable_that_is_read_behind_the_call_may_change_there() -> None:
    expected = stepped({"segments": 1}, around_a_function())
    aiao: dict[str, Any] = {"segments": 2, "schedule": "aiao"}
    assert stepped(aiao, around_a_function_behind()) == pytest.approx(expected, rel=1e-12)


def other_values(layout: dict[str, int]) -> str:
    def differs(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        out: Tensor = model(batch["x"] * (1 + torch.distributed.get_rank()))
        return out.square().mean()

    with pytest.raises(Fold3dError) as error:
        stepped(layout, differs)
    return str(error.value)


def test_stages_that_call_the_model_with_other_values_are_told(ranks: RankPool) -> None:
    for text in ranks.run(other_values, 2, {"pp": 2}):
        assert "or called the model with other values" in text


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    assert running_loss() is None
    assert issubclass(SplitError, Fold3dError)
