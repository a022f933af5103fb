"""trace(): what it says about models, where it forbids cuts, and that it needs neither memory nor data."""

from __future__ import annotations

import random
import resource
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fold3d.errors import SplitError, TraceError
from fold3d.splitting.capture import _InHostMemory
from fold3d.stage.split_model import SplitModel
from fold3d.trace import find_blocks, trace
from fold3d.trace.coat import Coat, Wrap
from fold3d.trace.shadow import fake, fake_copy
from fold3d.trace.without_values import WithoutValues
from fold3d.trace.wrappers import set_whole_shape
from tests.trace.chains import assert_equal, chained, cuts, ranks_of, record, whole
from tests.trace.zoo import Plain, build, checkpointed, plain, tokens


class Short(Plain):
    """Runs the first four of its blocks, unless told to run all."""

    runs = 4
    more: Sequence[int] = ()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.drawn()
        x = self.embedding(input_ids)
        for layer in self.layers[: self.runs + len(self.more)]:
            x = layer(x)
        return x.square().mean()

    def drawn(self) -> float:
        return 0.0


def test_blocks_that_are_not_called_belong_to_no_cut() -> None:
    """As those of cross-attention where there is no image."""
    torch.manual_seed(0)
    model = Short(layers=5).double()
    recorded = trace(model, example=tokens())
    assert recorded.blocks == tuple(f"layers.{k}" for k in range(4))
    assert recorded.skipped == ("layers.4",)
    assert set(recorded.unread) >= {name for name, _ in model.named_parameters() if name.startswith("layers.4.")}
    ranks = ranks_of(model, recorded, [(0, 1), (1, 2), (2, 3), (3, 4)], 2)
    assert_equal(chained(ranks, recorded, 4, tokens()), whole(model, tokens()))
    for one in (model, *(rank._model for rank in ranks)):
        one.runs = 5
    assert_equal(chained(ranks, recorded, 4, tokens()), whole(model, tokens()))
    for rank in ranks:
        del rank._model.runs
        rank._model.more = [1]  # by what no recording can know
    with pytest.raises(SplitError, match=r"block 'layers\.4' ran where the end was due"):
        chained(ranks, recorded, 4, tokens())


def test_gpt2() -> None:
    recorded = record(build("gpt2"))
    assert recorded.blocks == tuple(f"transformer.h.{i}" for i in range(4))
    assert recorded.prologue == ("transformer.wte", "transformer.wpe", "transformer.drop")
    assert recorded.epilogue == ("transformer.ln_f", "lm_head")
    assert recorded.between == recorded.shared == ()
    assert recorded.tied == (("transformer.wte.weight", "lm_head.weight"),)
    assert recorded.alike_from(3) == 0
    assert not any(recorded.borders)
    assert not any(recorded.modified)


def test_costs() -> None:
    recorded = record(build("llama"))
    batch, length, width, inner, key_value = 1, 32, 32, 48, 16
    linear = 2 * width * width + 2 * width * key_value + 3 * width * inner
    attention = 2 * length * width
    for cost, name in zip(recorded.costs, recorded.blocks, strict=True):
        assert cost.name == name
        assert cost.parameters == linear + 2 * width
        assert cost.flops == 2 * batch * length * (linear + attention)
    assert recorded.prologue_cost.parameters == 64 * width
    assert recorded.prologue_cost.flops == 0
    assert recorded.epilogue_cost.parameters == 64 * width + width
    assert recorded.epilogue_cost.flops == 2 * batch * length * 64 * width


@pytest.mark.parametrize("style", ["tensor", "pair", "constants", "in_place"])
def test_plain(style: str) -> None:
    recorded = record(plain(style), tokens())
    assert recorded.blocks == tuple(f"layers.{i}" for i in range(4))
    assert recorded.prologue == ("embedding",)
    assert recorded.epilogue == ("head",)
    assert recorded.shared == ("position", "scale")
    assert recorded.tied == (("embedding.weight", "head.weight"),)
    assert [s.num_tensors for s in recorded.structures] == [2 if style == "pair" else 1] * 4
    assert recorded.structures[0].constants == (((1, None), (2, 7)) if style == "constants" else ())
    # a block that writes into its input modifies what the block before returned
    assert recorded.modified == (*[style == "in_place"] * 3, False)
    assert recorded.shapes[0][0] == ((2, 12, 16), torch.float64)


def test_the_model_is_not_touched() -> None:
    model = build("gpt2").eval()
    before = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    state = torch.get_rng_state()
    record(model)
    assert before == {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_meta_and_real_models_give_the_same_trace() -> None:
    from transformers import GPT2LMHeadModel

    real = build("gpt2").float()
    with torch.device("meta"):
        meta = GPT2LMHeadModel(real.config)
    assert record(real) == record(meta)


def test_a_giant_takes_no_memory() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=12288, n_layer=48, n_head=96, n_positions=2048)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recorded = trace(model)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes
    assert sum(cost.parameters for cost in recorded.costs) > 86e9


def test_an_example_of_ones_own() -> None:
    model = build("llama")
    recorded = trace(model, example=tokens(3, 7))
    assert recorded.shapes[0][0][0] == (3, 7, 32)


def test_activation_checkpointing_in_the_model_changes_nothing() -> None:
    model = build("llama")
    want = record(model)
    model.activation_checkpointing_enable()
    assert record(model) == want
    assert record(checkpointed(), tokens()).uses == record(plain(), tokens()).uses


def test_vision_transformer() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ViTForImageClassification(config).double().train()
    recorded = record(model)
    batch = {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.double), "labels": torch.tensor([0, 1])}
    ranges = [(0, 1), (1, 3)]
    assert_equal(chained(ranks_of(model, recorded, ranges, 2), recorded, 2, batch), whole(model, batch))


class TestBlocks:
    def test_by_name(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        assert find_blocks(model, ".") == ["0", "1", "2"]
        assert find_blocks(build("gpt2"), "transformer.h") == [f"transformer.h.{i}" for i in range(4)]

    def test_a_root_sequential(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        batch = {"input": torch.randn(5, 4, dtype=torch.double)}
        recorded = record(model, batch, blocks=".")
        split = SplitModel(model, recorded, [(0, 1), (1, 2), (2, 3)])
        inputs: list[Tensor] = []
        for chunk in range(3):
            inputs, result = split.run(chunk, lambda: model(**batch), inputs, None)
        split.remove()
        assert torch.equal(result, model(**batch))

    def test_the_largest_list_of_one_class(self) -> None:
        model = nn.ModuleDict(
            {
                "small": nn.ModuleList(nn.Linear(2, 2) for _ in range(6)),
                "large": nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)) for _ in range(2)),
                "mixed": nn.Sequential(nn.Linear(99, 99), nn.ReLU()),
            }
        )
        assert find_blocks(model) == ["large.0", "large.1"]

    def test_none(self) -> None:
        with pytest.raises(TraceError, match=r"no blocks found in Sequential.*'\.' \(2 x Linear \+ ReLU.*`blocks`"):
            find_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        with pytest.raises(TraceError, match=r"no blocks found in Linear: .*no ModuleList and no Sequential"):
            find_blocks(nn.Linear(4, 4))

    def test_several(self) -> None:
        model = nn.ModuleDict({name: nn.ModuleList(nn.Linear(2, 2) for _ in range(3)) for name in "ab"})
        with pytest.raises(TraceError, match=r"several equally large.*'a' \(3 x Linear.*'b'.*`blocks`"):
            find_blocks(model)
        assert find_blocks(model, "b") == ["b.0", "b.1", "b.2"]

    def test_wrong_name(self) -> None:
        with pytest.raises(TraceError, match=r"blocks='layer': .* has no module of that name.*'layers' \(4 x Block"):
            find_blocks(plain(), "layer")
        with pytest.raises(TraceError, match=r"has no children to cut between"):
            find_blocks(plain(), "embedding")

    def test_two_stacks_of_checkpointing_layers(self) -> None:
        from transformers import CLIPConfig, CLIPModel

        tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config = CLIPConfig(text_config=tower, vision_config={**tower, "image_size": 16, "patch_size": 8})
        with torch.device("meta"):
            model = CLIPModel(config)
        stacks = [f"{tower}_model.encoder.layers.{k}" for tower in ("text", "vision") for k in range(2)]
        assert find_blocks(model) == stacks
        assert find_blocks(model, "vision_model.encoder.layers") == stacks[2:]
        assert find_blocks(model, "vision_model.encoder.layers, text_model.encoder.layers") == [
            *stacks[2:],
            *stacks[:2],
        ]


class TestRefusals:
    def test_a_plain_module_needs_an_example(self) -> None:
        with pytest.raises(TraceError, match=r"Plain is no transformers model, so an example batch is needed"):
            trace(plain())

    def test_a_bad_example(self) -> None:
        with pytest.raises(TraceError, match=r"could not be recorded.*'tokens': \(2, 3\).*check that `example`"):
            trace(plain(), example={"tokens": torch.zeros(2, 3)})

    def test_branching_on_values(self) -> None:
        class Branching(Plain):
            def between(self, x: Any) -> Any:
                return x if x.sum() > 0 else -x

        with pytest.raises(
            TraceError, match=r"'return x if x.sum\(\) > 0 else -x'.*decides what to compute by a value"
        ):
            trace(Branching(), example=tokens())

    def test_a_block_that_does_not_run(self) -> None:
        model = Short(layers=5)
        with pytest.raises(TraceError, match=r"block 'layers\.4' did not run .*\(1 of 5 blocks"):
            trace(model, blocks="layers", example=tokens())
        model.drawn = random.random
        with pytest.raises(TraceError, match=r"block 'layers\.4' did not run .*skipped at random"):
            trace(model, example=tokens())

    def test_what_cannot_travel(self) -> None:
        class Carrier:
            pass

        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: Any) -> Any:
                return self.linear(x[0] if isinstance(x, tuple) else x), Carrier()

        model = nn.Sequential(Odd(), Odd())
        with pytest.raises(TraceError, match=r"block '0' returns a Carrier, which cannot be sent"):
            trace(model, blocks=".", example={"input": torch.zeros(2, 4)})


class Skipping(nn.Module):
    """x0 is read again later, in ways that differ."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.bias = nn.Parameter(torch.randn(8))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        how = self.how
        if how == "shared":
            extra = torch.tanh(self.bias)
        x = self.first(x)
        early = x
        for i, layer in enumerate(self.layers):
            y = torch.tanh(layer(x))
            if how == "embedding" and i == 3:
                y = y + early
            if how == "detached" and i == 3:
                y = y + early.detach()
            if how == "shared":
                y = y + extra
            if how == "block" and i == 1:
                kept = y
            if how == "block" and i == 4:
                y = y + kept
            if how == "shape" and i == 3:
                y = y + torch.ones_like(early)
            if how == "residual":
                y = y + x
            x = y
        return x.pow(2).sum()


class TestBorders:
    @pytest.mark.parametrize(
        ("how", "tensors"),
        [
            ("none", [0, 1, 1, 1, 1]),
            ("shape", [0, 1, 1, 1, 1]),
            ("shared", [0, 1, 1, 1, 1]),
            ("embedding", [0, 2, 2, 2, 2]),
            ("detached", [0, 2, 2, 2, 2]),
            ("block", [0, 1, 1, 2, 2]),
            ("residual", [0, 2, 3, 4, 5]),
        ],
    )
    def test_as_much_crosses_as_is_read_later(self, how: str, tensors: list[int]) -> None:
        torch.manual_seed(0)
        model = Skipping(how).double()
        batch = {"x": torch.randn(3, 8, dtype=torch.double)}
        recorded = record(model, batch)
        assert not any(recorded.borders)
        assert [len(border) for border in recorded.crossings] == tensors
        want = whole(model, batch)
        for ranges in cuts(5):
            ranks = ranks_of(model, recorded, ranges, min(len(ranges), 2))
            assert_equal(chained(ranks, recorded, len(ranges), batch), want)

    def test_what_a_module_also_keeps_is_refused(self) -> None:
        class Keeps(Plain):
            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                x = self.embedding(input_ids)
                for number, layer in enumerate(self.layers):
                    x = layer(x)
                    if number == 0:
                        layer.seen = x
                return (x + self.layers[0].seen).sum()

        recorded = record(Keeps(), tokens())
        assert all("it is also kept in layers.0.seen" in reason for reason in recorded.borders[1:])

    def test_results_that_are_made_before_the_last_chunk(self) -> None:
        model = build("llama")
        model.config.output_hidden_states = True
        recorded = record(model)
        assert [len(border) for border in recorded.crossings] == [0, 2, 3, 4]
        model.config.output_hidden_states = False
        model.config._attn_implementation = "eager"
        model.config.output_attentions = True
        recorded = record(model)
        assert not any(recorded.borders)
        assert [len(border) for border in recorded.crossings] == [0, 2, 3, 4]

    def test_a_cache_filled_by_the_first_block(self) -> None:
        cache: dict[str, Tensor] = {}

        class Cached(nn.Module):
            def __init__(self, first: bool) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.first = first

            def forward(self, x: Tensor) -> Tensor:
                if self.first:
                    cache["ones"] = torch.ones(4)
                return self.linear(x) + cache["ones"]

        model = nn.Sequential(*(Cached(i == 0) for i in range(3)))
        recorded = record(model, {"input": torch.zeros(2, 4)}, blocks=".")
        assert all("a tensor made in '0' is read again later" in reason for reason in recorded.borders[1:])


def test_ranges() -> None:
    model = plain()
    recorded = record(model, tokens())
    with pytest.raises(TraceError, match=r"chunk 1 has the blocks \[3, 4\) but must start at block 2"):
        SplitModel(model, recorded, [(0, 2), (3, 4)])
    with pytest.raises(TraceError, match=r"end at block 3, but the model has 4"):
        SplitModel(model, recorded, [(0, 2), (2, 3)])
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_wrapper_on_the_instance_does_not_hide_the_model() -> None:
    """accelerate puts a bound method on the model, others put functions."""
    from types import MethodType

    want = record(plain(), tokens())
    model = plain()
    forward = model.forward
    model.forward = lambda **batch: forward(**batch)
    assert record(model, tokens()) == want
    model = plain()
    model.forward = MethodType(lambda self, **batch: type(self).forward(self, **batch), model)
    assert record(model, tokens()) == want


def test_a_copy_of_a_shard_is_whole() -> None:
    """Fake copies are asked for the shapes that the whole model has, and its attributes."""
    layer = torch.nn.Linear(4, 6)
    layer.weight.data = layer.weight.data[:3].clone()
    set_whole_shape(layer.weight, (6, 4))
    coat = Coat()
    coat.put(Wrap.PART_ATTRIBUTES, layer, {"out_features": 3})
    coat.put(Wrap.PART_ATTRIBUTES, layer, {"out_features": 2})
    mode = FakeTensorMode()
    copied = fake_copy(layer, mode)
    assert copied.weight.shape == (6, 4) and copied.out_features == 6
    assert layer.weight.shape == (3, 4) and layer.out_features == 2
    coat.close()
    assert layer.out_features == 6


@pytest.mark.parametrize(
    "tensor",
    [
        nn.Parameter(torch.zeros(4, 6).t()),
        nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(3).expand(2, 3),
    ],
)
def test_tensors_without_values_are_as_torch_makes_them(tensor: Tensor) -> None:
    mode = FakeTensorMode()
    with mode:
        made: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
    with WithoutValues(), _InHostMemory():  # whatever is recorded meanwhile, and whatever else runs
        found = fake(tensor, mode)
    assert isinstance(found, FakeTensor) and isinstance(made, FakeTensor)
    assert isinstance(found, nn.Parameter) == isinstance(tensor, nn.Parameter)
    assert found.fake_mode is made.fake_mode and vars(found).keys() == vars(made).keys()
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "_version"):
        assert getattr(found, name) == getattr(made, name), name
    assert found.stride() == made.stride()
    assert found.untyped_storage().nbytes() == made.untyped_storage().nbytes()


class Hooked(torch.nn.Linear):
    """Its copies watch their gradients themselves."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight.register_hook(lambda gradient: gradient)


def test_a_frozen_module_whose_copies_hook_their_parameters() -> None:
    layer = Hooked(4, 6)
    layer.requires_grad_(False)
    copied = fake_copy(layer, FakeTensorMode())
    assert not any(parameter.requires_grad for parameter in copied.parameters())


class _ForNobody(nn.Module):
    """Reads its blocks' first result with a module whose own result nobody reads."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        self.pool(first)
        return self.blocks[2](second).sum()


@pytest.mark.parametrize(("pool", "carried"), [(nn.Linear(4, 4), False), (nn.BatchNorm1d(4), True)])
def test_what_is_read_for_nobody_does_not_travel_unless_it_leaves_a_trace(pool: nn.Module, carried: bool) -> None:
    """A norm's running mean is such a trace."""
    recorded = trace(_ForNobody(pool), example={"x": torch.randn(2, 4)})
    assert ("blocks.0" in [value.module for one in recorded.crossings[2] for value in one.values]) == carried


class _Spread(nn.Module):
    """Divides by numbers that it puts into a tensor, one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.blocks[0](x)
        most = torch.tensor([one.detach().max() for one in hidden], dtype=hidden.dtype)
        return self.blocks[1](hidden / most[:, None]).sum()


def test_a_tensor_of_numbers_without_values_is_recorded() -> None:
    model, batch = _Spread().double(), {"x": torch.randn(2, 4, dtype=torch.double)}
    recorded = trace(model, example=batch)
    ranges = [(0, 1), (1, 2)]
    assert_equal(chained(ranks_of(model, recorded, ranges, 2), recorded, 2, batch), whole(model, batch))
