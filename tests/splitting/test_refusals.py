"""What cannot be divided, or is not as the user says, is an error that names it before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from fold3d.errors import ConfigError, TraceError
from fold3d.sharding.plan import ShardingPlan
from fold3d.splitting import infer, plan_sharding
from fold3d.trace.capture import trace_call
from tests.splitting.models import build
from tests.splitting.shared import compare


def plan(family: str, tp: int, overrides: dict[str, str] | None = None) -> Any:
    tiny = build(family)
    return plan_sharding(tiny.model, tiny.trace(), tiny.batch, tp, overrides)


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize(
    "family, tp, says",
    [
        ("gpt2", 8, r"transformer\.h\.0\.attn\.c_attn \(32, 96\) .*4 units are fewer than tp=8"),
        ("gpt2", 3, r"128 units do not divide by tp=3"),
        ("bert", 3, r"64 units do not divide by tp=3"),
        ("olmo2", 2, r"self_attn\.q_proj \(32, 32\) .*every input channel depends on all that feeds it"),
    ],
)
def test_what_does_not_divide(family: str, tp: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        plan(family, tp)
    assert "'replicate'" in str(error.value)


def test_the_error_says_what_to_write() -> None:
    with pytest.raises(ConfigError) as error:
        plan("olmo2", 2)
    said = eval(str(error.value).rpartition("tp_plan=")[2].removesuffix("."))
    assert plan("olmo2", 2, said).shards


@pytest.mark.gate(cases=3)
@pytest.mark.parametrize(
    "overrides, says",
    [
        ({"self_attention": "replicate"}, r"tp_plan\['self_attention'\] matches no module"),
        ({"mlp.*": "rows"}, r"is 'rows'; it must be one of colwise, rowwise, replicate"),
        ({"attn.c_attn": "rowwise"}, r"tp_plan says 'rowwise' of transformer\.h\.0\.attn\.c_attn, but it is colwise"),
        ({"ln_1": "colwise"}, r"tp_plan says 'colwise' of transformer\.h\.0\.ln_1, but it is replicate"),
        ({"lm_head": "rowwise"}, r"tp_plan says 'rowwise' of lm_head; it is colwise"),
        (
            {"mlp": "colwise"},
            r"tp_plan\['mlp'\] is 'colwise', but .* no weights itself; .* such as transformer\.h\.0\.mlp\.",
        ),
        ({"mlp.act": "colwise"}, r"tp_plan\['mlp\.act'\] is 'colwise', but what it matches holds no weights itself$"),
    ],
)
def test_overrides_that_cannot_be_followed(overrides: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan("gpt2", 2, overrides)


def test_overrides_are_followed() -> None:
    words = {
        "transformer.h.*.attn.c_attn": "replicate",
        "attn.c_proj": "replicate",
        "mlp.c_fc": "colwise",
        "lm_head": "replicate",
    }
    found = plan("gpt2", 2, words)
    assert "transformer.h.0.mlp.c_fc.weight" in found.shards
    assert not any(".attn." in name or "wte" in name for name in found.shards)
    reasons = found.blocks["transformer.h.1"].reasons
    assert reasons["attn.c_attn"] == 'whole: tp_plan says "replicate"'


def test_whole_blocks_and_weights_by_their_own_names_are_followed() -> None:
    found = plan("gpt2", 2, {"transformer.h.0": "replicate", "transformer.h.1.mlp.*.weight": "replicate"})
    assert not found.blocks["transformer.h.0"].groups
    assert [group.exits for group in found.blocks["transformer.h.1"].groups] == [("attn.c_proj",)]
    assert "transformer.wte.weight" in found.shards
    assert "transformer.wte.weight" not in plan("gpt2", 2, {"lm_head.weight": "replicate"}).shards


def test_all_that_lies_in_a_module_is_whole() -> None:
    found = plan("gpt2", 2, {"transformer.h.0.mlp": "replicate"})
    assert [group.exits for group in found.blocks["transformer.h.0"].groups] == [("attn.c_proj",)]
    assert len(found.blocks["transformer.h.1"].groups) == 2


def test_one_module_of_a_region_keeps_all_of_it_whole() -> None:
    with pytest.raises(ConfigError, match=r"attn\.c_attn .*a module of its region is to be whole \(at attn\.c_proj"):
        plan("gpt2", 2, {"attn.c_proj": "replicate"})


def test_three_ranks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.down(torch.relu(self.up(x)))
            return out

    model, batch = stacked(Block)
    found = plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 3)
    assert compare(model, batch, found) < 1e-10
    assert {shard.length(rank) for shard in found.shards.values() for rank in range(3)} == {8}


def test_a_block_with_many_numbers_is_searched_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every set of four of them was tried, for minutes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
            for number in range(16):
                setattr(self, f"number_{number}", 2 + 2 * number)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            hidden = hidden * torch.arange(1, 1 + hidden.shape[-1]) / 24  # a rank does not know which units it has
            scale: float = sum(getattr(self, f"number_{number}") for number in range(16))
            return x + self.down(hidden) / scale

    tried: list[Any] = []
    slices = infer.Numbers._slices

    def counted(self: infer.Numbers, *args: Any) -> Any:
        tried.append(args)
        return slices(self, *args)

    monkeypatch.setattr(infer.Numbers, "_slices", counted)
    monkeypatch.setattr(infer, "_MOST_SETS", 30)
    model, batch = stacked(Block)
    with pytest.raises(ConfigError, match=r"layers\.0\.up \(24, 8\) cannot be divided"):
        plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)
    assert tried and len(tried) % 30 == 0 and len(tried) <= 120


def stacked(block: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(block() for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor]:
            for layer in self.layers:
                x = layer(x)
            return (x,)

    torch.manual_seed(0)
    return Stacked().double(), {"x": torch.randn(2, 3, 8).double()}


class OwnLinear(nn.Module):
    """A linear layer of the user's own, and so no nn.Linear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.b = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = OwnLinear(8, 32), OwnLinear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class BareBlock(nn.Module):
    """All weights in the block itself, which computes with functions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnFunctions()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class OwnFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(32, 8) / 4)
        self.second = nn.Parameter(torch.randn(8, 16) / 4)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = nn.functional.linear(x, self.first).chunk(2, -1)
        return nn.functional.linear(torch.sigmoid(gate) * up, self.second, self.bias)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.mT).mT


@pytest.mark.parametrize("block", [OwnBlock, BareBlock])
def test_products_that_are_no_linear_module(block: type[nn.Module]) -> None:
    model, batch = stacked(block)
    found = plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)
    assert compare(model, batch, found) < 1e-10
    assert len(found.shards) >= 6


class Idle(OwnBlock):
    """Holds what does not run: a large module, or one of several alike."""

    def __init__(self, in_a_list: bool) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(8)) if in_a_list else nn.Linear(8, 64)
        self.first = 0 if in_a_list else None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = x + torch.tanh(self.others[self.first](x))  # type: ignore[index]
        return super().forward(x)


def test_what_never_runs_stays_whole() -> None:
    """As a decoder's cross-attention, of a model without an encoder."""
    model, batch = stacked(lambda: Idle(False))
    found = plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)
    assert compare(model, batch, found) < 1e-10
    assert found.blocks["layers.0"].unrun == ("others",) and "layers.0.up.w" in found.shards


def test_one_of_several_alike_will_run() -> None:
    model, batch = stacked(lambda: Idle(True))
    traced = trace_call(model, ["layers.0", "layers.1"], batch)
    with pytest.raises(ConfigError, match=r"layers\.0\.others\.\d \(8, 8\) cannot be divided"):
        plan_sharding(model, traced, batch, 2)


def test_unknown_data_flow() -> None:
    model, batch = stacked(Convolution)
    traced = trace_call(model, ["layers.0", "layers.1"], batch)
    with pytest.raises(ConfigError, match=r"layers\.0\.mix \(8, 8, 3\) cannot be divided: no matrix product with it"):
        plan_sharding(model, traced, batch, 2)
    assert not plan_sharding(model, traced, batch, 2, {"mix": "replicate"}).shards


def test_a_wrong_proof_leaves_a_region_whole() -> None:
    """A gradient that only the user's code knows of: forwards agree, backwards do not."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * gradients[0].abs().mean(-1, keepdim=True)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.down(Scaled.apply(self.up(x)))
            return out

    model, batch = stacked(Odd)
    with pytest.raises(ConfigError, match=r"divided, rank 0 has another gradient of"):
        plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)


def test_a_forward_that_replaces_modules_in_blocks() -> None:
    """Attention to blocks of tokens, for sequences of less than a few of these."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = torch.randint(1, 96, (2, 6))

    def of(attention: str) -> ShardingPlan:
        config = hf.BigBirdConfig(**sizes, intermediate_size=64, attention_type=attention)
        model = hf.BigBirdForMaskedLM(config).double()
        blocks = [f"bert.encoder.layer.{number}" for number in range(2)]
        return plan_sharding(model, trace_call(model, blocks, {"input_ids": ids}), {"input_ids": ids}, 2)

    with pytest.raises(TraceError, match=r"'bert.encoder.layer.0.attention.self' .*attention_type, say"):
        of("block_sparse")
    assert all(split.groups for split in of("original_full").blocks.values())


def test_plans_are_remembered_by_what_decides_them() -> None:
    one, other = build("llama"), build("llama")
    first = plan_sharding(one.model, one.trace(), one.batch, 2)
    assert plan_sharding(other.model, other.trace(), other.batch, 2) is first
    assert plan_sharding(other.model, other.trace(), other.batch, 4) is not first
    other.model.set_attn_implementation("eager")  # type: ignore[operator]
    eager = plan_sharding(other.model, other.trace(), other.batch, 2)
    assert eager is not first, "it knows where attention weights lie"
    other.model.config.num_attention_heads = 2  # type: ignore[union-attr]
    assert plan_sharding(other.model, other.trace(), other.batch, 2) is not eager


def test_the_digest_is_that_of_the_plan() -> None:
    assert plan("llama", 2).digest == plan("llama", 2).digest != plan("llama", 4).digest
    assert plan("llama", 1).shards == {}
    with pytest.raises(ConfigError, match="tp must be at least 1, got 0"):
        plan("llama", 0)


class Experts(nn.Module):
    """A block that holds its experts' weights itself, so the smallest module around their products is the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = (nn.Parameter(torch.randn(shape)) for shape in ((4, 16, 32), (4, 32, 16)))

    def forward(self, x: Tensor) -> Tensor:
        parts = enumerate(self.norm(x).flatten(0, 1).chunk(4))
        return x + torch.cat([(part @ self.up[k]).relu() @ self.down[k] for k, part in parts]).view(x.shape)


class UnseenExperts(Experts):
    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.norm(x).flatten(0, 1).chunk(4), self.up, self.down, strict=True)
        return x + torch.cat([(part @ up).relu() @ down for part, up, down in parts]).view(x.shape)


@pytest.mark.parametrize(
    "block, why",
    [
        (Experts, "divided, rank 0 returns something else"),  # the sum of what ranks return has the residual of each
        (UnseenExperts, "no matrix product with it was seen"),
    ],
)
def test_what_cannot_be_divided_is_whole(block: type[Experts], why: str) -> None:
    model = nn.Sequential(block(), block()).double()
    batch = {"input": torch.randn(2, 8, 16).double()}
    traced = trace_call(model, ["0", "1"], batch)
    with pytest.raises(ConfigError, match=rf"0\.up .*cannot be divided: {why}.* tp_plan={{'up': "):
        plan_sharding(model, traced, batch, 2)
    found = plan_sharding(model, traced, batch, 2, {"up": "replicate", "down": "replicate"})
    assert not found.shards


def test_weights_that_lie_elsewhere() -> None:
    """A block that reaches a module through a plain list: nobody would sum its gradients over the ranks."""

    class Block(OwnBlock):
        def __init__(self) -> None:
            super().__init__()
            self.elsewhere: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(sum((module(x) for module in self.elsewhere), x))

    model, batch = stacked(Block)
    assert plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2).shards
    model.common = nn.Linear(8, 8).double()
    for layer in model.layers:
        layer.elsewhere = [model.common]
    with pytest.raises(ConfigError, match="weights of modules that are not registered in it"):
        plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)
