"""What a running chunk refuses, with the reason and the setting to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.errors import SplitError, TraceError
from fold3d.stage.split_model import SplitModel
from fold3d.trace import trace
from fold3d.trace.arguments import Arguments
from fold3d.weights.release import release
from tests.trace.chains import assert_equal, chained, needed_parameters, ranks_of, record, whole
from tests.trace.zoo import Plain, build, checkpointed, plain, tokens

HALVES = [(0, 2), (2, 4)]


def split_of(model: nn.Module, ranges: Any = HALVES) -> SplitModel:
    return SplitModel(model, record(model, None if hasattr(model, "config") else tokens()), ranges)


def test_wrong_number_of_tensors() -> None:
    split = split_of(plain())
    model = split._model
    with pytest.raises(
        SplitError, match=r"chunk from block 2 on was given 0 tensors, but 1 cross the border before block 'layers\.2'"
    ):
        split.run(1, lambda: model(**tokens()), [], None)
    with pytest.raises(SplitError, match=r"chunk from block 0 on was given 1 tensors, but the first chunk takes none"):
        split.run(0, lambda: model(**tokens()), [torch.zeros(2)], None)


def test_a_call_that_does_not_run_the_model() -> None:
    split = split_of(plain())
    for chunk, received in enumerate(([], [torch.zeros(2, 12, 16)])):
        with pytest.raises(SplitError, match=r"returned without calling the model, .* or set pp=1 and segments=1"):
            split.run(chunk, lambda: None, received, None)


def test_a_call_that_runs_the_model_twice() -> None:
    model = plain()
    split = split_of(model, [(0, 4)])
    batch = tokens()
    with pytest.raises(SplitError, match=r"calls the model a second time .* set pp=1 and segments=1"):
        split.run(0, lambda: (model(**batch), model(**batch)), [], None)
    split.run(0, lambda: model(**batch), [], None)  # the model is usable again


def test_a_run_within_a_run() -> None:
    model = plain()
    split = split_of(model, [(0, 4)])
    with pytest.raises(SplitError, match=r"already running"):
        split.run(0, lambda: split.run(0, lambda: None, [], None), [], None)


def test_a_block_that_is_skipped() -> None:
    """Such as OPT with layerdrop."""

    class Dropping(Plain):
        drop = False

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            if self.drop:
                x = self.embedding(input_ids)
                for i in (0, 2, 3):
                    x = self.layers[i](x)
                return x.sum()
            return super().forward(input_ids, labels)

    model = Dropping()
    split = split_of(model)
    model.drop = True
    with pytest.raises(SplitError, match=r"block 'layers\.1' did not run"):
        split.run(0, lambda: model(**tokens()), [], None)


def test_another_constant_than_recorded() -> None:
    model = plain("constants")
    split = split_of(model)
    block = model.layers[1]
    block.style = "tensor"
    with pytest.raises(SplitError, match=r"returned tensor; recorded was \('tensor', None, 7\)"):
        split.run(0, lambda: model(**tokens()), [], None)


class Caching(Plain):
    """Its blocks return what the next token would need, in evaluation and unless told not to."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool | None = None) -> Any:
        keep = (not self.training) if use_cache is None else use_cache
        x = self.embedding(input_ids)
        for layer in self.layers:
            layer.style = "pair" if keep else "tensor"
            x = layer(x)[0] if keep else layer(x)
        return {"loss": x.square().mean(), "last": x}


def test_a_cache_that_blocks_return_in_evaluation() -> None:
    torch.manual_seed(0)
    model = Caching().double()
    recorded = trace(model, example=Arguments.of("", tokens()).reading(True))
    ranks = ranks_of(model, recorded, [(0, 2), (2, 4)], 2)
    for one in (model, *(rank._model for rank in ranks)):
        one.eval()
    assert_equal(chained(ranks, recorded, 2, tokens(), only_loss=True), whole(model, tokens()))
    with pytest.raises(SplitError, match=r"returned \('tensor', 'tensor'\).*model\.config\.use_cache = False"):
        chained(ranks, recorded, 2, tokens())  # a metric may read it


def test_one_checkpoint_around_a_border() -> None:
    model = checkpointed(every=2)
    batch = tokens()
    recorded = record(model, batch)
    want = whole(model, batch)
    assert_equal(chained(ranks_of(model, recorded, HALVES, 2), recorded, 2, batch), want)
    ranks = ranks_of(model, recorded, [(0, 1), (1, 4)], 2)
    with pytest.raises(SplitError, match=r"covers both block 'layers\.0' and 'layers\.1'.*recompute=True"):
        chained(ranks, recorded, 2, batch)


def test_a_reentrant_checkpoint_in_the_users_forward() -> None:
    model = checkpointed(reentrant=True)
    batch = tokens()
    recorded = record(model, batch)
    ranks = ranks_of(model, recorded, HALVES, 2)
    with pytest.raises(SplitError, match=r"use_reentrant=False"):
        chained(ranks, recorded, 2, batch)


class Whole(torch.autograd.Function):
    """Runs layers in its forward, and again in its backward, as reversible layers are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList, *weights: Tensor) -> Tensor:
        ctx.layers, ctx.weights = layers, weights
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = y = ctx.saved_tensors[0].detach().requires_grad_()
            for layer in ctx.layers:
                y = layer(y)
        first, *others = torch.autograd.grad(y, [x, *ctx.weights], gradient)
        return first, None, *others


def test_blocks_inside_of_a_function_of_the_models_own() -> None:
    class Reversible(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            x = Whole.apply(self.embedding(input_ids), self.layers, *self.layers.parameters())
            return nn.functional.cross_entropy((x @ self.head.weight.T).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model = Reversible().double()
    batch = tokens()
    recorded = record(model, batch)
    with pytest.raises(SplitError, match=r"the forward of a torch.autograd.Function \(Whole\).*pp=1, segments=1"):
        chained(ranks_of(model, recorded, HALVES, 2), recorded, 2, batch)


def test_frozen_blocks_under_no_grad() -> None:
    class Frozen(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            with torch.no_grad():
                x = self.layers[1](self.layers[0](self.embedding(input_ids)))
            for layer in self.layers[2:]:
                x = layer(x)
            return nn.functional.cross_entropy((x @ self.head.weight.T).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model = Frozen().double()
    batch = tokens()
    recorded = record(model, batch)
    want = whole(model, batch)
    for cut in (1, 2, 3):
        ranks = ranks_of(model, recorded, [(0, cut), (cut, 4)], 2)
        assert_equal(chained(ranks, recorded, 2, batch), want)


def test_a_parameter_that_the_recording_did_not_see() -> None:
    class Optional(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(16, 16)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None, more: bool = False) -> Any:
            x = self.embedding(input_ids)
            x = self.extra(x) if more else x
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    model = Optional()
    recorded = record(model, tokens())
    names = needed_parameters(model, recorded, HALVES, 1)
    assert "extra.weight" in names  # by its place in the model, behind the blocks
    release(model, set(needed_parameters(model, recorded, HALVES, 0)))
    split = SplitModel(model, recorded, HALVES)
    with pytest.raises(SplitError, match=r"more=True.* chunk 0 would need extra\.bias, which lies on another rank"):
        split.run(0, lambda: model(**tokens(), more=True), [], None)


def test_exceptions_named_meta_are_not_mistaken() -> None:
    model = build("gpt2")
    split = split_of(model)

    def call() -> None:
        raise ValueError("meta")

    with pytest.raises(ValueError, match=r"^meta$"):
        split.run(0, call, [], None)


def test_experts_in_float32_are_recorded_in_either_form() -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, num_local_experts=2, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    grouped = record(model)
    model.set_experts_implementation("batched_mm")
    batched = record(model)
    assert grouped.blocks == batched.blocks
    assert grouped.shapes == batched.shapes
    assert grouped.uses == batched.uses
    assert [cost.flops for cost in grouped.costs] == [cost.flops for cost in batched.costs]


@pytest.mark.parametrize(
    "computed",
    [
        lambda model, found: found["loss"].add_(sum(p.pow(2).sum() for p in model.parameters())),
        lambda model, found: nn.functional.linear(torch.ones(2, 16), model.layers[0].up.weight).sum(),
    ],
    ids=["in place", "a layer"],
)
def test_a_loss_of_weights_that_lie_elsewhere(computed: Any) -> None:
    """torch adds nothing, or what lay in memory, where one of the numbers is on meta."""
    model = plain()
    recorded = record(model, tokens())
    first, last = ranks_of(model, recorded, HALVES, 2)
    borders, _ = first.run(0, lambda: first._model(**tokens()), [], None)
    with pytest.raises(SplitError, match=r"uses a part of the model by itself \(.* another process.* set pp=1"):
        last.run(1, lambda: computed(last._model, last._model(**tokens())), borders, None)


def test_a_container_is_not_called() -> None:
    """It was said that layerdrop skips it."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(3)
            )

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer["down"](layer["up"](x))
            return x

    with pytest.raises(
        TraceError, match=r"'layers\.0' did not run .* it is a ModuleDict, which holds modules and is not"
    ):
        trace(Pairs(), blocks="layers", example={"x": torch.zeros(2, 4)})
