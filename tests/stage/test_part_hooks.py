"""Hooks of tied weights, which see parts of the gradient where the model is cut."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.errors import RankError
from tests.helpers.ranks import RankPool

logger = logging.getLogger(__name__)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Tied(nn.Module):
    """Its first layer and its last one are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x).square().mean()


def train(layout: dict[str, int], hook: Callable[[nn.Module], Any] | None) -> list[str]:
    """Returns what two steps warn of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fold3d.stage.part_hooks").addHandler(handler)
    torch.manual_seed(0)
    model = Tied()
    if hook is not None:
        hook(model)
    engine = Engine(model, ParallelConfig(micro_batches=2, blocks="layers", **layout), optimizer=SGD)
    for _ in range(2):
        engine.step({"x": torch.ones(2, 4)})
    engine.close()
    logging.getLogger("fold3d.stage.part_hooks").removeHandler(handler)
    return said


def of_gradient(model: nn.Module) -> None:
    model.get_parameter("first.weight").register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def after_accumulation(model: nn.Module) -> None:
    model.get_parameter("first.weight").register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]


def of_one_layer(model: nn.Module) -> None:
    model.get_parameter("layers.1.weight").register_hook(lambda gradient: None)


@pytest.mark.parametrize("hook", [of_gradient, after_accumulation])
def test_a_hook_that_sees_parts_is_said_once(hook: Callable[[nn.Module], Any]) -> None:
    (text,) = train({"segments": 2}, hook)
    assert "a hook of first.weight sees its gradient in 2 parts" in text and "on_pre_optimizer_step" in text


def of_a_block(model: nn.Module) -> None:
    layer = model.get_submodule("layers.1")
    layer.register_forward_hook(lambda module, args, output: logger.debug(args[0].mean().item()))


def of_what_it_takes(model: nn.Module) -> None:
    model.get_submodule("layers.1").register_forward_hook(lambda module, args, output: output + args[0])


def of_torch(model: nn.Module) -> None:
    torch.nn.utils.spectral_norm(model.get_submodule("layers.1"))


def test_a_hook_of_a_block_is_said_once() -> None:
    (text,) = train({"segments": 2}, of_a_block)
    assert text.startswith("hooks of layers.1 run in every chunk of the model") and "set pp=1 and segments=1" in text


def test_results_of_what_another_chunk_was_given_are_not_read() -> None:
    """In the second chunk the block has only returned what it did: what it was given is not there."""
    with pytest.raises(RankError, match=r"reads what a hook of layers\.1 keeps of a layer that another chunk runs"):
        train({"segments": 2}, of_what_it_takes)


@pytest.mark.parametrize(
    ("segments", "hook"), [(1, of_gradient), (1, of_a_block), (2, of_one_layer), (2, of_torch), (2, None)]
)
def test_whole_gradients_need_no_words(segments: int, hook: Callable[[nn.Module], Any] | None) -> None:
    assert not train({"segments": segments}, hook)


def test_on_several_stages(ranks: RankPool) -> None:
    """fold3d's own hooks, which are there with two replicas, are none."""
    for said in ranks.run(train, 2, {"pp": 2}, of_gradient):
        assert len(said) == 1 and "first.weight" in said[0]
    assert ranks.run(train, 2, {"dp": 2, "segments": 2}, None) == [[], []]
