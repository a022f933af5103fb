"""What hooks take of modules inside of blocks (attention weights, router logits) is the same on every chunk."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.errors import SplitError
from fold3d.trace import trace
from fold3d.trace.arguments import Arguments
from tests.trace.chains import Ranges, assert_equal, chained, cuts, ranks_of, record, whole
from tests.trace.stacks import build
from tests.trace.zoo import build as build_plain
from tests.trace.zoo import tokens

RANGES: Ranges = [(0, 1), (1, 2), (2, 4)]


def _of_attentions(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A loss that reads what some layers attended to."""
    output = model(**batch, output_attentions=True)
    assert len(output.attentions) == 4
    return {"loss": output.loss + (output.attentions[1] * output.attentions[3]).square().sum()}


def _whole(model: nn.Module, batch: dict[str, Tensor], call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **named: Tensor) -> Any:
            return call(self.model, named)

    loss, gradients = whole(Called(), batch)
    return loss, {name.removeprefix("model."): value for name, value in gradients.items()}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("family", "recompute"), [("llama", False), ("bert", True)])
def test_attentions_that_a_batch_asks_for(family: str, recompute: bool) -> None:
    model = build_plain(family)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    recorded = record(model, tokens(padded=True))  # without them
    want = _whole(model, tokens(padded=True), _of_attentions)
    ranks = ranks_of(model, recorded, RANGES, 2, recompute=recompute)
    assert_equal(chained(ranks, recorded, 3, tokens(padded=True), call=_of_attentions), want)
    # The form without them holds as before.
    assert_equal(chained(ranks, recorded, 3, tokens(padded=True)), whole(model, tokens(padded=True)))


def test_a_hook_of_the_users_that_reads_what_a_module_was_given() -> None:
    """Its result is shown again behind a cut, where nobody has the arguments."""
    model = build_plain("llama")
    model.set_attn_implementation("eager")  # type: ignore[operator]
    ranks = ranks_of(model, record(model, tokens()), RANGES, 2)
    seen: list[Tensor] = []
    for rank in ranks:
        module = rank._model.get_submodule("model.layers.1.self_attn")
        module.register_forward_hook(lambda _, args, output: seen.append(output[0]))
    assert_equal(
        chained(ranks, ranks[0]._trace, 3, tokens(), call=_of_attentions), _whole(model, tokens(), _of_attentions)
    )
    assert seen
    for rank in ranks:
        module = rank._model.get_submodule("model.layers.1.self_attn")
        module.register_forward_hook(lambda _, args, kwargs, output: kwargs["hidden_states"], with_kwargs=True)
    with pytest.raises(SplitError, match=r"a hook of 'model\.layers\.1\.self_attn' fails with KeyError.*pp=1"):
        chained(ranks, ranks[0]._trace, 3, tokens(), call=_of_attentions)


def test_only_what_is_read_travels_and_all_keeps_its_place() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_plain("llama")
            self.model.set_attn_implementation("eager")  # type: ignore[operator]

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            found = self.model(input_ids, output_attentions=True, use_cache=False)
            assert len(found.attentions) == 4
            return {"loss": found.logits.mean() + found.attentions[2].square().sum()}

    model = Reading()
    recorded = trace(model, example=Arguments.of("", tokens()).reading(True))
    inside = [value.module for one in recorded.crossings[3] for value in one.values if "self_attn" in value.module]
    assert inside == ["model.model.layers.2.self_attn"]
    assert not any("self_attn" in value.module for one in recorded.crossings[2] for value in one.values)
    for ranges in (RANGES, [(0, 3), (3, 4)]):
        got = chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), tokens(), only_loss=True)
        assert_equal(got, whole(model, tokens()))


def test_blocks_that_run_several_times() -> None:
    model, batch = build("albert")
    model.set_attn_implementation("eager")  # type: ignore[operator]
    recorded = record(model, batch)
    want = _whole(model, batch, _of_attentions)
    assert_equal(chained(ranks_of(model, recorded, RANGES, 2), recorded, 3, batch, call=_of_attentions), want)


def test_router_logits_of_a_configuration_and_of_a_batch() -> None:
    model, batch = build("mixtral")
    assert any("gate" in v.module for one in record(model, batch).crossings[1] for v in one.values)
    model.config.output_router_logits = False  # type: ignore[union-attr]
    recorded, asked = record(model, batch), {**batch, "output_router_logits": True}
    want, without = whole(model, asked), whole(model, batch)
    assert abs(float(want[0] - without[0])) > 1e-3
    ranges: Ranges = [(0, 1), (1, 2), (2, 4)]
    ranks = ranks_of(model, recorded, ranges, 2)
    assert_equal(chained(ranks, recorded, 3, asked), want)
    assert_equal(chained(ranks, recorded, 3, batch), without)


class _Gate(nn.Linear):
    pass


class _Block(nn.Module):
    """Hands what its gate returns to whoever it has been told of."""

    def __init__(self, keep: Callable[[Tensor], None] | None, in_place: bool) -> None:
        super().__init__()
        self.gate, self.down, self.in_place = _Gate(8, 8), nn.Linear(8, 8), in_place
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        if self.keep is not None:
            self.keep(gate)
        return x + self.down(gate.relu_() if self.in_place else gate.relu())


class _Collecting(nn.Module):
    """Reads what gates returned: as hooks saw it, or as blocks kept it."""

    def __init__(self, by_hooks: bool, in_place: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        keep = None if by_hooks else _keep
        self.layers = nn.ModuleList(_Block(keep, in_place) for _ in range(4))
        if by_hooks:
            for layer in self.layers:
                layer.gate.register_forward_hook(_hook)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        _KEPT.set([])
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean() + torch.stack(_KEPT.get()).square().mean()


_KEPT: ContextVar[list[Tensor]] = ContextVar("kept")


def _keep(tensor: Tensor) -> None:
    _KEPT.get([]).append(tensor)


def _hook(module: nn.Module, args: Any, output: Tensor) -> None:
    _keep(output)


_hook.__module__ = "transformers.made_up"  # hooks of users are not recorded, but watched by LossCheck


def test_hooks() -> None:
    torch.manual_seed(0)
    model = _Collecting(True).double()
    recorded = trace(model, example=tokens())
    for ranges in cuts(4):
        got = chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), tokens())
        assert_equal(got, whole(model, tokens()))


def _input_first(module: nn.Module, args: Any, output: Tensor) -> None:
    if not _KEPT.get([]):
        _keep(args[0])
    _keep(output)


_input_first.__module__ = _hook.__module__


def test_hooks_that_read_what_a_block_hands_on_to_its_module() -> None:
    """As transformers collects hidden states, the embeddings first."""
    torch.manual_seed(0)
    model = _Collecting(False)
    for layer in model.layers:
        layer.keep = None
        layer.gate.register_forward_hook(_input_first)
    model = model.double()
    recorded = trace(model, example=tokens())
    assert "embedding" in {value.module for one in recorded.crossings[3] for value in one.values}
    for ranges in cuts(4):
        got = chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), tokens())
        assert_equal(got, whole(model, tokens()))


def test_hidden_states_of_modules_in_blocks_that_run_several_times() -> None:
    model, batch = build("albert")
    recorded = record(model, batch)

    def of_states(one: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = one(**batch, output_hidden_states=True)
        return found.loss + sum(state.square().mean() for state in found.hidden_states)

    want = _whole(model, batch, of_states)
    assert_equal(chained(ranks_of(model, recorded, RANGES, 2), recorded, 3, batch, call=of_states), want)


class _Experts(nn.Module):
    """Decides by what a gate says which tokens it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        places = (gate.flatten(0, 1).argmax(-1) < 4).nonzero()[:, 0]
        return torch.zeros_like(flat).index_add(0, places, self.one(flat[places])).view_as(x)


class _Routing(_Block):
    def __init__(self) -> None:
        super().__init__(None, False)
        self.experts = _Experts()

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return x + self.experts(x, gate) * gate.sum(-1, keepdim=True)


@pytest.mark.full
def test_hooks_in_a_block_of_which_another_module_decides_by_values() -> None:
    torch.manual_seed(0)
    model = _Collecting(False)
    model.layers = nn.ModuleList(_Routing() for _ in range(4))
    for layer in model.layers:
        layer.gate.register_forward_hook(_hook)
    model = model.double()
    recorded = trace(model, example=tokens())
    for ranges in cuts(4):
        got = chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), tokens())
        assert_equal(got, whole(model, tokens()))


@pytest.mark.parametrize(
    ("by_hooks", "in_place", "reason"),
    [
        (False, False, "a tensor made in 'layers.0' is read again later, .*, and it is no result of that module"),
        (True, True, "what 'layers.0.gate' returned is read again later, .*, and it is written to in place in between"),
    ],
)
def test_refusals(by_hooks: bool, in_place: bool, reason: str) -> None:
    recorded = trace(_Collecting(by_hooks, in_place), example=tokens())
    for border in recorded.borders[1:]:
        assert re.match(reason, border), border
