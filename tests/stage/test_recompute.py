"""Which blocks and modules are recomputed, and that it shows in what is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from fold3d.errors import ConfigError
from fold3d.placement.recomputed_blocks import recomputed_blocks
from fold3d.recompute import Recompute
from fold3d.stage.recompute import check_names, modules_to_recompute, recompute_modules, recomputed
from fold3d.trace.coat import Coat
from tests.helpers import models

BLOCKS = [f"h.{i}" for i in range(8)]
RANGES = [(0, 2), (2, 4), (4, 6), (6, 8)]
"""Of two stages with two segments: stage 0 has blocks 0, 1, 4 and 5."""


def test_blocks_are_counted_on_each_stage() -> None:
    def found(text: str, pp: int = 2) -> str:
        names = recomputed_blocks(BLOCKS, RANGES, pp, Recompute.parse(text))
        return " ".join(name.removeprefix("h.") for name in names)

    assert found("blocks") == "0 1 2 3 4 5 6 7"
    assert found("blocks:2") == "0 2 4 6"
    assert found("blocks:3") == "0 2 5 7"  # 0 and 5 of 0 1 4 5, 2 and 7 of 2 3 6 7
    assert found("blocks:3", pp=1) == "0 3 6"
    assert found("blocks/none/full/attn") == "0 1"
    assert found("none") == found("full") == ""


def test_a_model_in_one_piece_recomputes_block_by_block() -> None:
    assert recomputed_blocks(BLOCKS, [(0, 0)], 1, Recompute.parse(True)) == BLOCKS


def test_modules_by_name() -> None:
    model = models.build(models.gpt2_config(layers=2))
    blocks, ranges = ["transformer.h.0", "transformer.h.1"], [(0, 1), (1, 2)]

    def found(text: str) -> list[str]:
        return modules_to_recompute(model, blocks, ranges, Recompute.parse(text))

    assert found("attn,mlp") == [f"{block}.{name}" for block in blocks for name in ("attn", "mlp")]
    assert found("none/mlp") == ["transformer.h.1.mlp"]
    assert found("mlp.c_*/none") == ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
    assert found("mlp*/none") == ["transformer.h.0.mlp"]  # what is inside of it is recomputed with it
    assert found("full") == []
    with pytest.raises(ConfigError, match=r"'att' names no module .* 'transformer.h.0' has ln_1, attn, attn.c_attn"):
        found("att,mlp")


class Block(nn.Module):
    """A perceptron with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return y


def grads_and_kept(model: nn.Module) -> tuple[list[Tensor], int]:
    """Returns gradients, then buffers, and how many numbers a forward keeps."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = model(torch.arange(12.0).view(3, 4)).square().mean()
    loss.backward()
    return [*(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())], sum(kept)


def test_what_blocks_share_has_the_name_that_it_has_in_them() -> None:
    shared = nn.Linear(4, 4)
    blocks = nn.ModuleList(nn.ModuleDict({"mixer": shared, "mlp": nn.Linear(4, 4)}) for _ in range(2))
    model = nn.ModuleDict({"first": shared, "layers": blocks})
    check_names(model, Recompute.parse("mixer,mlp/none"))
    assert modules_to_recompute(model, ["layers.0", "layers.1"], [(0, 2)], Recompute.parse("mixer")) == [
        "layers.0.mixer",
        "layers.1.mixer",
    ]
    with pytest.raises(ConfigError, match=r"'mixed' names no module .*did you mean 'mixer'"):
        check_names(model, Recompute.parse("mixed"))


def test_what_may_be_meant_can_be_written() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Tanh()) for _ in range(2))
    model[0][0].add_module("query", nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"'query' names no module .*did you mean '0\.query'"):
        modules_to_recompute(model, ["0"], [(0, 1)], Recompute.parse("query"))


def test_batch_norms_count_once_and_less_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    plain, wrapped = copy.deepcopy(model), copy.deepcopy(model)
    expected, most = grads_and_kept(plain)
    coat = Coat()
    recompute_modules(coat, wrapped, ["0", "1.norm"])
    found, less = grads_and_kept(wrapped)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)) and less < most
    # A copy recomputes nothing, and what is taken off is gone.
    assert grads_and_kept(copy.deepcopy(wrapped))[1] > less
    coat.close()
    assert "forward" not in vars(wrapped[0])


@pytest.mark.parametrize("by_name", [True, False])
def test_the_random_numbers_of_a_device_are_found_again(monkeypatch: pytest.MonkeyPatch, by_name: bool) -> None:
    """torch keeps generators of the devices whose tensors a checkpoint is given by place: those must be all."""
    seen: list[set[int]] = []

    def looked(function: Any, *args: object, **named: Any) -> object:
        seen.append({id(one) for one in args})
        return checkpoint(function, *args, **named)

    monkeypatch.setattr("fold3d.stage.recompute.checkpoint", looked)
    module = Block()
    forward = recomputed(module, module.forward)
    x = torch.randn(8, 4, requires_grad=True)
    y = forward(x=x) if by_name else forward(x)
    (given,) = seen
    assert id(x) in given and len(given) == 2, "and one that lies where the module does"
    y.sum().backward()
    assert x.grad is not None


def test_a_cache_with_a_prefix_is_refused() -> None:
    model = models.build(models.llama_config(layers=2))
    attention = model.get_submodule("model.layers.1.self_attn")
    forward = recomputed(attention, lambda *args, **named: named["past_key_values"])
    cache = DynamicCache()
    assert forward(past_key_values=cache) is None, "a cache that is empty is not handed on"
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert forward(past_key_values=cache) is None, "of another layer"
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 1)
    with pytest.raises(ConfigError, match=r'3 tokens in it already.*recompute="none"'):
        forward(past_key_values=cache)
