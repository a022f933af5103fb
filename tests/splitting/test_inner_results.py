"""What hooks take of modules inside of blocks, and a model returns, is the whole on every rank, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.errors import ConfigError
from fold3d.sharding.plan import ShardingPlan
from fold3d.splitting import plan_sharding
from fold3d.splitting.plan_sharding import _plans
from fold3d.splitting.proof import BlockRuns
from fold3d.trace.capture import trace_call
from tests.splitting.models import Attention, Tiny, build
from tests.splitting.shared import compare

ATTENTIONS = (
    "gpt2", "llama", "opt", "bert", "gpt_neox", "bloom", "t5", "vit", "qwen3", "gptj", "llama_mqa",
    "mixtral",
)  # fmt: skip


def everything(output: Any) -> Tensor:
    """Returns a loss that reads every tensor that has a gradient."""
    found = list(leaves(output))
    assert len(found) > 2, "more than loss and logits"
    return torch.stack([(x * torch.linspace(-1, 1, x.numel()).double().view(x.shape)).sum() for x in found]).sum()


def leaves(output: Any) -> list[Tensor]:
    """Returns the tensors of an output that have a gradient."""
    tensors: list[Tensor] = []
    torch.utils._pytree.tree_map_only(Tensor, tensors.append, output)
    return [x for x in tensors if x.requires_grad]


def eager(family: str) -> Tiny:
    """Returns a model whose attention returns its weights when asked."""
    tiny = build(family)
    tiny.model.set_attn_implementation("eager")  # type: ignore[operator]
    return tiny


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("shares_sequence", [False, True])
@pytest.mark.parametrize("family", ATTENTIONS)
def test_attention_weights_of_all_heads(family: str, shares_sequence: bool) -> None:
    """Asked for in a call of a model that was recorded without, and read by the loss."""
    tiny = eager(family)
    plan = plan_sharding(tiny.model, tiny.trace(), tiny.batch, 2, sequence_parallel=shares_sequence)
    assert bool(plan.sequence) == shares_sequence
    batch: dict[str, Any] = {**tiny.batch, "output_attentions": True, "output_hidden_states": True}
    assert compare(tiny.model, batch, plan, result=everything) < 1e-10


@pytest.mark.parametrize(("family", "tp"), [("gpt2", 4), ("bloom", 2)])
def test_attention_weights_that_a_configuration_asks_for(family: str, tp: int) -> None:
    tiny = eager(family)
    tiny.model.config.output_attentions = True  # type: ignore[union-attr]
    plan = plan_sharding(tiny.model, tiny.trace(), tiny.batch, tp, sequence_parallel=True)
    assert not plan.sequence
    assert compare(tiny.model, tiny.batch, plan, result=everything) < 1e-10


def test_attention_weights_that_blocks_compute_when_asked_are_asked_for_by_the_call_that_is_recorded() -> None:
    """Falcon's compute them by other code, of which nothing is known where it did not run."""
    tiny = build("falcon_groups")
    batch: dict[str, Any] = {**tiny.batch, "output_attentions": True}
    plan = plan_sharding(tiny.model, tiny.trace(), tiny.batch, 2)
    with pytest.raises(ConfigError, match=r"'transformer\.h\.0' computed, .* \(2x2x6x6\) .* configuration ask for it"):
        compare(tiny.model, batch, plan, result=everything)
    plan = plan_sharding(tiny.model, trace_call(tiny.model, tiny.blocks, batch), batch, 2)
    assert compare(tiny.model, batch, plan, result=everything) < 1e-10


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("shares_sequence", [False, True])
def test_logits_of_routers_for_all_tokens(family: str, shares_sequence: bool) -> None:
    """Each rank has those of its part of the sequence; 7 tokens are no equal parts."""
    tiny = build(family)
    plan = plan_sharding(tiny.model, tiny.trace(), tiny.batch, 2, sequence_parallel=shares_sequence)
    assert bool(plan.sequence) == shares_sequence
    ids = torch.randint(1, 96, (3, 7))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids, "output_router_logits": True}
    assert compare(tiny.model, batch, plan, result=everything) < 1e-10


class _Scores(nn.Module):
    """Tells its hooks something that has no units: the mean over the neurons of this rank."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scores = nn.Linear(8, 16), nn.Linear(16, 8), _Scores()

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.relu(self.up(x))
        self.scores(inside)
        return x + self.down(inside)


class _Model(nn.Module):
    def __init__(self, collects: bool) -> None:
        super().__init__()
        self.layers, self._collects = nn.ModuleList(_Block() for _ in range(2)), collects

    def forward(self, x: Tensor) -> dict[str, Any]:
        seen: list[Tensor] = []
        hooked = self.layers if self._collects else ()
        hooks = [one.scores.register_forward_hook(lambda module, args, output: seen.append(output)) for one in hooked]
        for layer in self.layers:
            x = layer(x)
        for hook in hooks:
            hook.remove()
        return {"logits": x, "scores": tuple(seen)}


def _plan(model: nn.Module, batch: dict[str, Tensor]) -> ShardingPlan:
    return plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)


def test_parts_that_nobody_can_put_together_are_an_error_that_names_the_module() -> None:
    result: Callable[[Any], Tensor] = lambda output: output["logits"].square().sum()  # noqa: E731
    batch = {"x": torch.randn(2, 3, 8).double()}
    model = _Model(collects=False).double()
    assert compare(model, batch, _plan(model, batch), result=result) < 1e-10, "nobody asks"
    model = _Model(collects=True).double()
    plan = _plan(model, batch)
    assert plan.blocks["layers.0"].groups
    with pytest.raises(
        ConfigError, match=r"'layers\.0\.scores' computed, and with tp=2 .* \(2x3\) .*output_attentions"
    ):
        compare(model, batch, plan, result=result)


@dataclass
class _Output:
    loss: Tensor
    seen: tuple[Tensor, ...]


USES: dict[str, Callable[[list[Tensor], Tensor], Any]] = {
    "a loss of the first head": lambda seen, x: {"loss": x.square().mean() + sum(w[:, 0].std() for w in seen)},
    "means over heads": lambda seen, x: {"logits": x, "means": [w.mean(1) for w in seen]},
    "stacked": lambda seen, x: {"logits": x, "all": torch.stack(seen)},
    "sizes": lambda seen, x: {"loss": x.square().mean() * seen[0].shape[1]},
    "an object of its own": lambda seen, x: _Output(x.square().mean(), tuple(seen)),
    "a namespace": lambda seen, x: SimpleNamespace(loss=x.square().mean(), seen={"of": seen}),
    "dropped": lambda seen, x: {"loss": x.square().mean()},
}


class _Attending(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.layers, self._use = nn.ModuleList(Attention() for _ in range(2)), use

    def forward(self, x: Tensor) -> Any:
        seen: list[Tensor] = []
        for layer in self.layers:
            x, weights = layer(x)
            seen.append(weights)
        return USES[self._use](seen, x)


def _of_everything(output: Any) -> Tensor:
    found = leaves(vars(output) if hasattr(output, "__dict__") and not isinstance(output, dict) else output)
    return torch.stack([(x * torch.linspace(-1, 1, x.numel()).double().view(x.shape)).sum() for x in found]).sum()


@pytest.mark.gate(cases=3)
@pytest.mark.parametrize("shares_sequence", [False, True])
@pytest.mark.parametrize("use", USES)
def test_models_whose_own_code_reads_what_blocks_return_beside_the_hidden_state(
    use: str, shares_sequence: bool
) -> None:
    torch.manual_seed(0)
    model, batch = _Attending(use).double(), {"x": torch.randn(2, 7, 16).double()}
    trace = trace_call(model, ["layers.0", "layers.1"], batch)
    plan = plan_sharding(model, trace, batch, 2, sequence_parallel=shares_sequence)
    assert all(split.groups for split in plan.blocks.values())
    assert compare(model, batch, plan, result=_of_everything) < 1e-10


HIDDEN: dict[str, Callable[[list[Tensor]], Any]] = {
    "first tokens": lambda seen: [x[:, 0] for x in seen],
    "stacked": torch.stack,
    "as they are": tuple,
    "an object of its own": lambda seen: _Output(seen[0].square().mean(), tuple(seen)),
}


class _Telling(nn.Module):
    """`ask`: how to return what the blocks do. `between`: what happens to a hidden state on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: Tensor, ask: str = "", shifted: bool = False) -> Any:
        seen: list[Tensor] = []
        for layer in self.layers:
            x, _ = layer(x.roll(1, 1) if shifted else x.to(x.dtype))
            seen.append(x)
        found = HIDDEN[ask](seen) if ask else ()
        return found if isinstance(found, _Output) else {"logits": x, "found": found}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("asked", [*({"ask": ask} for ask in HIDDEN), {"shifted": True}, {}], ids=str)
def test_a_shared_sequence_and_code_that_reads_hidden_states_only_when_asked(asked: dict[str, Any], tp: int) -> None:
    """Asked of a model that was recorded without: nothing said that anybody reads them."""
    torch.manual_seed(0)
    model, batch = _Telling().double(), {"x": torch.randn(2, 7, 16).double()}
    plan = plan_sharding(
        model, trace_call(model, [f"layers.{n}" for n in range(3)], batch), batch, tp, sequence_parallel=True
    )
    assert plan.sequence, plan.sequence_reason
    assert compare(model, {**batch, **asked}, plan, result=_of_everything) < 1e-10


def test_what_later_blocks_read_is_whole_though_nothing_is_known_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unwatched(BlockRuns):
        def whole(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("this block cannot be watched")

    monkeypatch.setattr("fold3d.splitting.inner_results.BlockRuns", Unwatched)
    _plans.cache_clear()
    torch.manual_seed(0)
    model, batch = _Attending("dropped").double(), {"x": torch.randn(2, 7, 16).double()}
    trace = trace_call(model, ["layers.0", "layers.1"], batch)
    for shares_sequence in (False, True):
        plan = plan_sharding(model, trace, batch, 2, sequence_parallel=shares_sequence)
        assert bool(plan.sequence) == shares_sequence
        assert compare(model, batch, plan, result=_of_everything) < 1e-10
        attending = _Attending("stacked").double()
        with pytest.raises(ConfigError, match=r"'layers\.0' computed, and with tp=2"):
            compare(attending, batch, plan, result=_of_everything)
    _plans.cache_clear()
