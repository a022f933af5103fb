"""Code around a model whose weights are spread: what it reads of them is an error, what hooks see is said."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import ConfigError, Engine, ParallelConfig
from fold3d.stage.loss_reads import ShardReads
from fold3d.stage.loss_run import LossRun
from fold3d.trace.wrappers import set_whole_shape
from tests.helpers.ranks import RankPool


def sharded() -> nn.Sequential:
    """A model with half of the rows of its first layer, and of its block's layer, "2.0". The gradient of the block's
    bias is summed."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    set_whole_shape(model[0].weight, (6, 4))
    set_whole_shape(model[2][0].weight, (6, 3))
    return model


def watched(model: nn.Module, code: Any) -> Any:
    with ShardReads(model, dict(model.named_parameters()), ["2"], ["2.0.bias"]).watched():
        return code(model)


READS = [
    lambda model: sum(one.norm() for one in model.parameters()),
    lambda model: nn.functional.linear(torch.ones(4), model[0].weight),
    lambda model: model(torch.ones(4)).sum() + model[0].weight.detach().abs().max(),
    lambda model: model[0].weight.T,
    lambda model: model[0].weight.tolist(),
    lambda model: model[0].weight.detach().numpy(),
    lambda model: torch.equal(model[0].weight, model[0].weight),
    lambda model: float(model[0].weight.sum()),
    lambda model: 0 in model[0].weight,
    lambda model: model[0].weight.data,
]
HARMLESS = [
    lambda model: model(torch.ones(2, 4)),
    lambda model: model[1].weight.norm() + sum(one.numel() for one in model.parameters()),
    lambda model: (
        model[0].weight.shape,
        model[0].weight.dtype,
        model[0].weight.grad,
        model[0].weight.requires_grad_(),
    ),
    lambda model: torch.nn.utils.parameters_to_vector(model[1].parameters()),
]


@pytest.mark.parametrize("code", READS)
def test_reading_a_part_is_an_error(code: Any) -> None:
    with pytest.raises(ConfigError, match=r"the weight '0.weight'.*\(3, 4\) of \(6, 4\).*tp_plan=\{'0': 'replicate'\}"):
        watched(sharded(), code)


@pytest.mark.parametrize("code", HARMLESS)
def test_modules_and_whole_weights_are_free(code: Any) -> None:
    watched(sharded(), code)


def test_a_part_of_a_block_is_not_called_alone() -> None:
    """Nobody has proved what it computes with a part of its weights, nor what other modules do with these."""
    watched(sharded(), lambda model: model[2](torch.ones(3)))
    for code in (
        lambda model: model[2][0](torch.ones(3)),
        lambda model: Around(model[2])(torch.ones(3)),
    ):
        with pytest.raises(ConfigError, match=r"the weight '2\.0\.weight', of which each rank"):
            watched(sharded(), code)


class Around(nn.Module):
    """Runs its block, and adds a penalty."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block[0].weight.norm()


def test_a_gradient_that_is_summed_over_the_ranks() -> None:
    watched(sharded(), lambda model: model[2](torch.ones(3)))
    with pytest.raises(
        ConfigError, match=r"the weight '2\.0\.bias'. Its gradient is the sum of .*sequence_parallel=False"
    ):
        watched(sharded(), lambda model: model[2][0].bias.square().sum())


def test_sizes_are_those_of_the_whole_weight() -> None:
    sizes = watched(sharded(), lambda model: (model[0].weight.numel(), model[0].weight.shape, model[0].weight.size(0)))
    assert sizes == (24, (6, 4), 6)


def test_every_step_is_watched() -> None:
    model = sharded()
    reads = ShardReads(model, dict(model.named_parameters()), ["2"], [])
    for _ in range(2):
        with reads.watched():
            pass
        with pytest.raises(ConfigError), reads.watched():
            model[0].weight.norm()


@pytest.mark.parametrize("is_first", [False, True])
def test_behind_the_models_call(is_first: bool) -> None:
    """A loss function goes on inside of the model's call, which it then leaves, watched before or not."""
    model = sharded()
    reads = ShardReads(model, dict(model.named_parameters()), ["2"], [])

    def function() -> Tensor:
        out: Tensor = model(torch.ones(2, 4)).sum()
        return out + model[0].weight.norm()

    loss = LossRun(function)
    with nullcontext() if is_first else reads.watched():
        loss.begin(model, [""], torch.device("cpu"), None)
    with pytest.raises(ConfigError), reads.watched():
        loss.end(torch.ones(2, 2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def plain(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def penalised(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch) + 1e-3 * sum(one.square().sum() for one in model.parameters())
    return loss


def weighed(model: nn.Module, batch: Any, before: bool) -> Tensor:
    """Uses a weight in the shape that it has on one process."""
    whole = torch.ones(32, 8)

    def term() -> Tensor:
        return (model.get_parameter("layers.0.up.weight") * whole).sum()

    if before:
        added = term()
        return plain(model, batch) + added
    return plain(model, batch) + term()


def first_step(before: bool) -> str:
    """Returns the error of a loss that uses a weight in the first micro-batch."""
    engine = Engine(Stack(), ParallelConfig(tp=2), optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    try:
        engine.run([{"x": torch.ones(2, 3, 8)}], functools.partial(weighed, before=before))
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        engine.close()
    return ""


def train(hook: bool, penalty: bool) -> tuple[str, list[str]]:
    """Returns the error, "" without one, and what is warned of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fold3d.stage.part_hooks").addHandler(handler)
    torch.manual_seed(0)
    model = Stack()
    if hook:
        model.get_submodule("layers.0.up").register_forward_hook(lambda *_: None)
        model.get_parameter("layers.1.down.weight").register_hook(lambda gradient: gradient / gradient.norm())
    engine = Engine(model, ParallelConfig(tp=2), optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
    error = ""
    try:
        for step in range(2):
            engine.run([{"x": torch.ones(2, 3, 8)}], penalised if penalty and step else plain)
    except Exception as raised:
        error = str(raised)
    engine.close()
    logging.getLogger("fold3d.stage.part_hooks").removeHandler(handler)
    return error, said


def test_through_the_engine(ranks: RankPool) -> None:
    assert ranks.run(train, 2, False, False) == [("", [])] * 2
    for error, said in ranks.run(train, 2, True, True):
        assert "reads the weight 'layers.0.up.weight'" in error
        assert len(said) == 1 and "module layers.0.up, weight layers.1.down.weight see what this rank" in said[0]


@pytest.mark.parametrize("before", [False, True], ids=["behind the call", "before it"])
def test_in_the_first_micro_batch(ranks: RankPool, before: bool) -> None:
    for error in ranks.run(first_step, 2, before):
        assert "ConfigError" in error and "the weight 'layers.0.up.weight'" in error
