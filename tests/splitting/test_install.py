"""install() on live modules: sliced before or after, undone, recomputed; dropout, autocast and forwards of others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fold3d.sharding.plan import ShardingPlan
from fold3d.splitting import plan_sharding
from fold3d.splitting.emulate import EmulatedGroup, EmulatedOps
from fold3d.stage.split_model import SplitModel
from fold3d.tensor_parallel.install import install
from fold3d.tensor_parallel.region import COPY, REDUCE, Exchange
from fold3d.trace.capture import trace_call
from fold3d.trace.coat import Coat
from tests.splitting.models import Tiny, build
from tests.splitting.shared import blocks_of, result_of, shard


class OneOfTwo:
    """RegionOps of a rank whose peer adds nothing: what it draws and keeps can be seen without one."""

    size = 2
    fused = None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[str] = []

    def exchange(self, x: Tensor, how: Exchange) -> Tensor:
        self.calls.append("f" if how == COPY else "g")
        return x.view_as(x) if how == COPY else x


def planned(family: str, tp: int = 2, **settings: Any) -> tuple[Tiny, ShardingPlan]:
    tiny = build(family)
    for module in tiny.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = settings.get("dropout", 0.0)
    return tiny, blocks_of(plan_sharding(tiny.model, tiny.trace(), tiny.batch, tp))


def as_ranks(
    tiny: Tiny, plan: ShardingPlan, prepare: Callable[[nn.Module, EmulatedOps], Callable[[], Tensor]]
) -> list[Tensor]:
    return EmulatedGroup(plan.tp).run(lambda ops: prepare(copy.deepcopy(tiny.model), ops)())


@pytest.mark.parametrize("sliced_first", [True, False])
def test_parameters_may_be_sliced_before_or_after(sliced_first: bool) -> None:
    tiny, plan = planned("gpt2")
    expected = result_of(tiny.model(**tiny.batch))

    def prepare(model: nn.Module, ops: EmulatedOps) -> Callable[[], Tensor]:
        if sliced_first:
            model = shard(model, plan, ops.rank)
            install(Coat(), model, plan, ops.rank, ops)
        else:
            install(Coat(), model, plan, ops.rank, ops)
            for name, spread in plan.shards.items():
                parameter = model.get_parameter(name)
                parameter.data = spread.take(parameter.data, ops.rank)
        return lambda: result_of(model(**tiny.batch))

    for found in as_ranks(tiny, plan, prepare):
        torch.testing.assert_close(found, expected)


def test_classes_stay_and_undo_gives_back_attributes_and_forwards() -> None:
    tiny, plan = planned("phi3")
    model = tiny.model
    block = model.get_submodule(tiny.blocks[0])
    attention: Any = block.get_submodule("self_attn")
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    expected = result_of(model(**tiny.batch))
    coat = Coat()
    install(coat, model, plan, 0, OneOfTwo(0))
    assert attention.config.num_attention_heads == 4 and model.config.num_attention_heads == 8
    assert {name: type(module) for name, module in model.named_modules()} == {
        n: kind for n, (kind, _) in before.items()
    }
    coat.close()
    assert attention.config is model.config
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == {
        n: own for n, (_, own) in before.items()
    }
    assert torch.equal(result_of(model(**tiny.batch)), expected)


def test_one_sum_in_each_direction_for_attention_and_for_the_perceptron() -> None:
    tiny, plan = planned("llama")
    ops = OneOfTwo(0)
    model = shard(tiny.model, plan, 0)
    install(Coat(), model, plan, 0, ops)
    result_of(model(**tiny.batch)).backward()
    assert ops.calls == ["f", "g", "f", "g"] * len(tiny.blocks)


def test_without_gradients_nothing_enters() -> None:
    tiny, plan = planned("llama")
    ops = OneOfTwo(0)
    model = shard(tiny.model, plan, 0)
    install(Coat(), model, plan, 0, ops)
    with torch.no_grad():
        model(**tiny.batch)
    assert ops.calls == ["g", "g"] * len(tiny.blocks)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", ["gpt2", "bert", "bloom"])
def test_recomputation_gives_the_same_gradients_with_dropout(family: str) -> None:
    tiny, plan = planned(family, dropout=0.5)

    def gradients(recompute: bool) -> dict[str, Tensor]:
        model = shard(tiny.model, plan, 1)
        install(Coat(), model, plan, 1, OneOfTwo(1))
        if recompute:
            for name in tiny.blocks:
                block = model.get_submodule(name)
                original = block.forward
                block.forward = lambda *a, original=original, **k: checkpoint(original, *a, use_reentrant=False, **k)
        torch.manual_seed(3)
        result_of(model(**tiny.batch)).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    kept, recomputed = gradients(False), gradients(True)
    assert kept.keys() == recomputed.keys()
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=0, atol=0)


class Block(nn.Module):
    """A perceptron with dropout between its layers, and one behind them, around which it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(self.down(self.inner(torch.tanh(self.up(x)))))
        return out


class Blocks(nn.Module):
    """Takes and returns [batch, length, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def masks_of(model: nn.Module, batch: dict[str, Tensor], plan: ShardingPlan, rank: int) -> dict[str, Tensor]:
    model = shard(model, plan, rank)
    install(Coat(), model, plan, rank, OneOfTwo(rank))
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, a, out, name=name: found.update({name: out == 0}))
    torch.manual_seed(5)
    model(**batch)
    return found


def test_dropout_differs_on_shards_and_agrees_elsewhere() -> None:
    model, batch = Blocks(), {"x": torch.randn(2, 3, 16)}
    plan = plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)
    one, other, again = (masks_of(model, batch, plan, rank) for rank in (0, 1, 0))
    inside = ["layers.0.inner", "layers.1.inner"]
    outside = ["layers.0.outer", "layers.1.outer"]
    assert all(torch.equal(mask, again[name]) for name, mask in one.items())
    assert not any(torch.equal(one[name], other[name]) for name in inside)
    assert all(torch.equal(one[name], other[name]) for name in outside)
    assert not torch.equal(one[inside[0]], one[inside[1]])


def test_masks_that_are_not_those_of_one_rank_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where it was not found out which part of the whole block's a rank's draw is."""
    model, batch = Blocks(), {"x": torch.randn(2, 3, 16)}
    plan = plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)
    unknown = {name: replace(split, draws=()) for name, split in plan.blocks.items()}
    one, other = (masks_of(model, batch, replace(plan, blocks=unknown), rank) for rank in (0, 1))
    assert not torch.equal(one["layers.0.inner"], other["layers.0.inner"])
    assert torch.equal(one["layers.0.outer"], other["layers.0.outer"])
    (said,) = (record for record in caplog.records if "random numbers of its own" in record.message)
    assert "share of a Block," in said.message


def test_evaluation_draws_nothing() -> None:
    tiny, plan = planned("gpt2", dropout=0.5)
    model = shard(tiny.model, plan, 0).eval()
    install(Coat(), model, plan, 0, OneOfTwo(0))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model(**tiny.batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_exception_inside_a_region_leaves_the_common_generator() -> None:
    tiny, plan = planned("gpt2", dropout=0.5)
    after = []
    for rank in range(2):
        model = shard(tiny.model, plan, rank)
        install(Coat(), model, plan, rank, OneOfTwo(rank))

        def fail(*_: Any) -> None:
            raise KeyError("a user's hook")

        model.get_submodule(f"{tiny.blocks[0]}.mlp.act").register_forward_hook(fail)
        torch.manual_seed(1)
        with pytest.raises(KeyError, match="a user's hook"):
            model(**tiny.batch)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


def test_autocast() -> None:
    tiny, plan = planned("bert")
    tiny.model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = result_of(tiny.model(**tiny.batch))

    def prepare(model: nn.Module, ops: EmulatedOps) -> Callable[[], Tensor]:
        model = shard(model, plan, ops.rank)
        install(Coat(), model, plan, ops.rank, ops)
        return lambda: result_of(model(**tiny.batch))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = as_ranks(tiny, plan, prepare)
    torch.testing.assert_close(found[0], expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(found[0], found[1])


def test_forwards_that_others_have_put_on_linear_layers_run() -> None:
    """As accelerate and adapters do; the bias behind a sum is added once."""
    tiny, plan = planned("bert")
    expected = result_of(tiny.model(**tiny.batch))
    count = {0: 0, 1: 0}

    def prepare(model: nn.Module, ops: EmulatedOps) -> Callable[[], Tensor]:
        model = shard(model, plan, ops.rank)
        for name in tiny.blocks:
            for inner in ("attention.self.query", "attention.output.dense", "output.dense"):
                module = model.get_submodule(f"{name}.{inner}")

                def forward(x: Tensor, original: Any = module.forward) -> Tensor:
                    count[ops.rank] += 1
                    return original(x)

                module.forward = forward
        install(Coat(), model, plan, ops.rank, ops)
        return lambda: result_of(model(**tiny.batch))

    for found in as_ranks(tiny, plan, prepare):
        torch.testing.assert_close(found, expected)
    assert count == {0: 3 * len(tiny.blocks), 1: 3 * len(tiny.blocks)}


def test_under_a_split_model() -> None:
    tiny, plan = planned("bloom")
    traced = tiny.trace().under(plan.tp)
    expected = result_of(tiny.model(**tiny.batch))

    def prepare(model: nn.Module, ops: EmulatedOps) -> Callable[[], Tensor]:
        model = shard(model, plan, ops.rank)
        install(Coat(), model, plan, ops.rank, ops)
        split = SplitModel(model, traced, [(0, 1), (1, 2)])

        def run() -> Tensor:
            sent, _ = split.run(0, lambda: model(**tiny.batch), [], None)
            return result_of(split.run(1, lambda: model(**tiny.batch), sent, None)[1])

        return run

    for found in as_ranks(tiny, plan, prepare):
        torch.testing.assert_close(found, expected)


def test_ranks_that_call_something_else_are_an_error() -> None:
    def as_rank(ops: EmulatedOps) -> Tensor:
        x = torch.ones(2)
        return ops.exchange(x, REDUCE) if ops.rank else x

    with pytest.raises(RuntimeError, match=r"ranks \[1\] wait for a sum over 2"):
        EmulatedGroup(2).run(as_rank)
    with pytest.raises(RuntimeError, match="the ranks call different operations"):
        EmulatedGroup(2).run(lambda ops: ops.exchange(torch.ones(2 + ops.rank), REDUCE))
