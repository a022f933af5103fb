"""SplitModel: every cut of every family equals the whole model."""

from __future__ import annotations

import cProfile
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.stage.loss_run import LossRun
from fold3d.stage.split_model import SplitModel
from fold3d.trace.shape_only import ShapeOnly
from tests.trace.chains import assert_equal, chained, cuts, loss_of, ranks_of, record, whole
from tests.trace.zoo import FAMILIES, FURTHER, build, checkpointed, plain, tokens

HALVES = [(0, 2), (2, 4)]
SINGLES = [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_equals_the_whole_model(family: str, padded: bool) -> None:
    model = build(family)
    recorded = record(model)
    batch = tokens(padded=padded)
    want = whole(model, batch)
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("family", FURTHER)
def test_more_families(family: str) -> None:
    model = build(family)
    recorded = record(model)
    batch = tokens(padded=True)
    ranks = ranks_of(model, recorded, SINGLES, 2)
    assert_equal(chained(ranks, recorded, 4, batch), whole(model, batch))


@pytest.mark.parametrize("style", ["tensor", "pair", "constants", "in_place"])
def test_every_cut_of_a_plain_module_equals_the_whole(style: str) -> None:
    model = plain(style)
    batch = tokens()
    recorded = record(model, batch)
    assert not any(recorded.borders)
    want = whole(model, batch)
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama_tied", "llama"])
def test_several_chunks_on_one_rank_with_one_model_object(family: str, pp: int) -> None:
    model = build(family)
    recorded = record(model)
    batch = tokens(padded=True)
    want = whole(model, batch)
    ranks = ranks_of(model, recorded, SINGLES, pp)
    assert_equal(chained(ranks, recorded, 4, batch), want)
    assert_equal(chained(ranks, recorded, 4, batch), want)  # nothing is left over from the first run


def test_what_is_received_stands_for_all_blocks_before_it_while_hooks_keep_what_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where activations leave: no shapes are inferred for a block of which nothing is read."""
    model = build("gpt2")
    recorded = record(model)
    batch = tokens()
    want = whole(model, batch)
    ranks = ranks_of(model, recorded, HALVES, 2)
    asked: list[str] = []
    monkeypatch.setattr(ShapeOnly, "__call__", recording(asked, ShapeOnly.__call__))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert_equal(chained(ranks, recorded, 2, batch), want)
    assert not [name for name in asked if name in recorded.blocks]


def recording(asked: list[str], call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call` of a ShapeOnly, which notes for whom it is asked."""

    def noted(self: ShapeOnly, *args: Any, **kwargs: Any) -> Any:
        asked.append(self._name)
        return call(self, *args, **kwargs)

    return noted


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", ["gpt2", "opt", "bert"])
def test_micro_batches_of_other_shapes(family: str) -> None:
    model = build(family)
    recorded = record(model)
    ranks = ranks_of(model, recorded, HALVES, 2)
    for shape in [(1, 5), (3, 20), (1, 5), (2, 1)]:
        batch = tokens(*shape)
        if shape[1] == 1 and family != "bert":  # one token predicts nothing
            batch["labels"] = torch.zeros_like(batch["labels"])
            continue
        assert_equal(chained(ranks, recorded, 2, batch), whole(model, batch))


class TestRecomputing:
    @pytest.mark.gate(cases=1)
    @pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gpt_neox"])
    @pytest.mark.parametrize("reentrant", [None, False, True])
    def test_equals_the_whole_model(self, family: str, reentrant: bool | None) -> None:
        model = build(family)
        recorded = record(model)
        batch = tokens(padded=True)
        want = whole(model, batch)
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        for ranges in (HALVES, SINGLES):
            ranks = ranks_of(model, recorded, ranges, 2, recompute=reentrant is None)
            assert_equal(chained(ranks, recorded, len(ranges), batch), want)

    @pytest.mark.parametrize("style", ["tensor", "pair", "constants"])
    def test_plain(self, style: str) -> None:
        model = plain(style)
        batch = tokens()
        recorded = record(model, batch)
        ranks = ranks_of(model, recorded, SINGLES, 2, recompute=True)
        assert_equal(chained(ranks, recorded, 4, batch), whole(model, batch))

    def test_keeps_only_the_inputs_of_the_blocks(self) -> None:
        model = plain()
        batch = tokens()
        recorded = record(model, batch)
        sizes = []
        for recompute in (False, True):
            split = SplitModel(model, recorded, [(0, 4)], recompute=recorded.blocks if recompute else ())
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
                split.run(0, lambda: model(**batch), [], None)
            sizes.append(sum(saved))
            split.remove()
        assert sizes[1] < sizes[0] / 2

    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_checkpoints_in_the_users_own_forward(self, dropout: float) -> None:
        model = checkpointed(dropout)
        batch = tokens()
        recorded = record(model, batch)
        one = ranks_of(model, recorded, [(0, 4)], 1)
        key = (3, 5, 7)
        want = chained(one, recorded, 1, batch, key=key)
        if not dropout:
            assert_equal(want, whole(model, batch))
        for ranges in cuts(4):
            for pp in (1, len(ranges)):
                ranks = ranks_of(model, recorded, ranges, pp)
                assert_equal(chained(ranks, recorded, len(ranges), batch, key=key), want)
        unchecked = plain(dropout=dropout)  # the same model without checkpoints draws the same masks
        unchecked.load_state_dict(model.state_dict())
        ranks = ranks_of(unchecked, record(unchecked, batch), SINGLES, 2)
        assert_equal(chained(ranks, recorded, 4, batch, key=key), want)


class TestDropout:
    @pytest.mark.gate(cases=1)
    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_split_equals_one_chunk(self, family: str, recompute: bool) -> None:
        model = build(family, dropout=0.2)
        self.check(model, record(model), tokens(padded=True), recompute)

    @pytest.mark.parametrize(
        ("style", "recompute"),
        [("tensor", False), ("tensor", True), ("pair", False), ("pair", True), ("in_place", False)],
    )
    def test_plain_with_dropout_between_blocks(self, style: str, recompute: bool) -> None:
        model = plain(style, dropout=0.2)
        batch = tokens()
        self.check(model, record(model, batch), batch, recompute)

    def check(self, model: nn.Module, recorded: Any, batch: dict[str, Tensor], recompute: bool) -> None:
        key = (42, 3, 1)
        want = chained(ranks_of(model, recorded, [(0, 4)], 1), recorded, 1, batch, key=key)
        for ranges, pp in [(HALVES, 2), (SINGLES, 4), (SINGLES, 2), (SINGLES, 1), ([(0, 4)], 1)]:
            ranks = ranks_of(model, recorded, ranges, pp, recompute=recompute)
            got = chained(ranks, recorded, len(ranges), batch, key=key)
            assert float(got[0]) == float(want[0])
            assert_equal(got, want)

    @pytest.mark.gate(cases=1)
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_with_gradient_checkpointing_of_transformers(self, reentrant: bool) -> None:
        model = build("gpt2", dropout=0.2)
        recorded = record(model)
        batch = tokens()
        key = (1, 2, 3)
        want = chained(ranks_of(model, recorded, [(0, 4)], 1), recorded, 1, batch, key=key)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        assert_equal(chained(ranks_of(model, recorded, SINGLES, 2), recorded, 4, batch, key=key), want)

    def test_masks_depend_on_every_part_of_the_key_and_on_nothing_else(self) -> None:
        model = build("gpt2", dropout=0.2)
        recorded = record(model)
        split = SplitModel(model, recorded, [(0, 4)])
        batch = tokens()

        def loss(key: tuple[int, int, int]) -> float:
            torch.manual_seed(torch.seed())
            return split.run(0, lambda: model(**batch).loss, [], key)[1].item()

        base = loss((1, 1, 1))
        assert base == loss((1, 1, 1))
        others = [loss(key) for key in [(2, 1, 1), (1, 2, 1), (1, 1, 2), (0, 1, 1), (1, 0, 1), (1, 1, 0)]]
        assert len({base, *others}) == 7

    def test_mean_of_the_masks(self) -> None:
        """Over many keys every position is dropped about equally often, in every block."""
        model = nn.Sequential(*(nn.Dropout(0.25) for _ in range(3)))
        holder = _Chain(model)
        batch = {"x": torch.ones(8, 8)}
        recorded = record(holder, batch, blocks="chain")
        split = SplitModel(holder, recorded, [(0, 3)])
        kept = sum((split.run(0, lambda: holder(**batch), [], (0, 0, i))[1] > 0).double() for i in range(2000)) / 2000
        assert abs(float(kept.mean()) - 0.75**3) < 0.01
        assert float((kept - 0.75**3).abs().max()) < 0.06

    def test_without_a_key_the_global_generator_decides(self) -> None:
        model = build("gpt2", dropout=0.2)
        batch = tokens()
        torch.manual_seed(9)
        want = model(**batch).loss.item()
        split = SplitModel(model, record(model), [(0, 4)])
        split.run(0, lambda: model(**batch), [], (1, 2, 3))
        torch.manual_seed(9)
        assert split.run(0, lambda: model(**batch).loss, [], None)[1].item() == want


class _Chain(nn.Module):
    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        for block in self.chain:
            x = block(x)
        return x


class TestAroundTheModel:
    def test_outside_of_run_the_model_is_itself(self) -> None:
        model = build("gpt2")
        batch = tokens(padded=True)
        want = whole(model, batch)
        recorded = record(model)
        split = SplitModel(model, recorded, HALVES, recompute=recorded.blocks)
        assert_equal(whole(model, batch), want)
        ids = batch["input_ids"][:, :4]
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 7)
        split.remove()
        assert not any("forward" in vars(module) for module in model.modules())
        assert_equal(whole(model, batch), want)

    def test_a_wrapped_forward_of_the_root_is_kept(self) -> None:
        """accelerate wraps model.forward in autocast, before or after the split."""
        model = build("llama").float()
        batch = tokens(padded=True)
        plain_forward = model.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return plain_forward(*args, **kwargs)

        recorded = record(model)
        ranks = ranks_of(model, recorded, HALVES, 2)
        model.forward = wrapped
        want = whole(model, batch)
        for rank in ranks:
            original = rank._model.forward

            def forward(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return original(*args, **kwargs)

            rank._model.forward = forward
        assert_equal(chained(ranks, recorded, 2, batch), want, tolerance=0)

    def test_an_instance_forward_of_somebody_else_is_wrapped_and_put_back(self) -> None:
        model = build("gpt2")
        block = model.transformer.h[1]
        calls = []
        original = block.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return original(*args, **kwargs)

        block.forward = counted
        batch = tokens()
        recorded = record(model)
        split = SplitModel(model, recorded, [(0, 4)])
        calls.clear()
        split.run(0, lambda: model(**batch), [], None)
        assert calls == [1]
        split.remove()
        assert block.forward is counted

    def test_compute_loss_runs_the_model(self) -> None:
        """The call may do things before and after the model, as Trainer.compute_loss does."""
        model = build("gpt2")
        recorded = record(model)
        batch = tokens()
        smoothing = nn.CrossEntropyLoss(label_smoothing=0.1)

        def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            inputs = dict(batch)
            labels = inputs.pop("labels")
            logits = model(**inputs)["logits"]
            return smoothing(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        loss = compute_loss(model, batch)
        model.zero_grad()
        loss.backward()
        want = loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        ranks = ranks_of(model, recorded, HALVES, 2)
        assert_equal(chained(ranks, recorded, 2, batch, call=compute_loss), want)

    def test_evaluation(self) -> None:
        model = build("llama").eval()
        batch = tokens(3, 9, padded=True)
        recorded = record(model)
        ranks = ranks_of(model, recorded, SINGLES, 2)
        inputs: list[Tensor] = []
        with torch.no_grad():
            want = model(**batch)
            for chunk in range(4):
                rank = ranks[chunk % 2]
                inputs, result = rank.run(chunk, lambda rank=rank: rank._model(**batch), inputs, None)
        assert torch.equal(result.logits, want.logits)
        assert loss_of(result) == want.loss

    @pytest.mark.parametrize("chunk", [0, 1])
    def test_errors_in_the_model_pass_and_leave_it_usable(self, chunk: int) -> None:
        model = build("gpt2")
        recorded = record(model, tokens())
        ranks = ranks_of(model, recorded, HALVES, 2)
        batch = tokens()
        hooked = ranks[chunk]._model.transformer.h[chunk * 2]

        def fail(*_: Any) -> None:
            raise KeyError("mine")

        handle = hooked.register_forward_hook(fail)
        with pytest.raises(KeyError, match="mine"):
            chained(ranks, recorded, 2, batch)
        handle.remove()
        assert_equal(chained(ranks, recorded, 2, batch), whole(model, batch))

    def test_nothing_of_a_finished_run_is_kept(self) -> None:
        """Activations die with the tensors that left: the exception that ends the forward holds no frames."""
        import gc
        import weakref

        model = build("gpt2")
        recorded = record(model, tokens())
        split = SplitModel(model, recorded, HALVES)
        seen: list[Any] = []
        model.transformer.h[0].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
        gc.disable()
        try:
            outputs, _ = split.run(0, lambda: model(**tokens()), [], (0, 0, 0))
            assert seen[0]() is not None  # the graph needs it
            del outputs
            assert seen[0]() is None
        finally:
            gc.enable()


def test_blocks_named_by_the_user_and_modules_between_them() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.body = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 8))
            self.norms = nn.ModuleDict({"a": nn.LayerNorm(6), "b": nn.LayerNorm(8)})
            self.last = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body[0](self.first(x))
            x = self.body[1](self.norms["a"](x))
            x = self.norms["b"](x)
            return self.last(self.norms["b"](self.body[2](x))).sum()

    torch.manual_seed(0)
    model = Between().double()
    batch = {"x": torch.randn(4, 8, dtype=torch.double)}
    recorded = record(model, batch, blocks="body")
    assert recorded.between == ("norms.a", "norms.b")
    assert recorded.epilogue == ("norms.b", "last")
    want = whole(model, batch)
    for ranges in cuts(3):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)


def test_reads_a_weight_without_calling_its_module() -> None:
    class Direct(nn.Module):
        """Embeds with F.embedding and projects with the same weight; no module is called outside the
        blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, ids: Tensor) -> Tensor:
            x = nn.functional.embedding(ids, self.table.weight)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return nn.functional.cross_entropy((x @ self.table.weight.T).flatten(0, 1), ids.flatten())

    torch.manual_seed(0)
    model = Direct().double()
    batch = {"ids": torch.randint(0, 10, (2, 5))}
    recorded = record(model, batch)
    assert recorded.shared == ("table.weight",)
    want = whole(model, batch)
    for ranges in cuts(3):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch), want)


def test_a_block_costs_a_few_calls() -> None:
    """Time would depend on the machine; functions that Python calls, its own and built-in ones, do not."""
    blocks = 64
    holder = _Chain(nn.Sequential(*(nn.Identity() for _ in range(blocks))))
    batch = {"x": torch.ones(1)}
    split = SplitModel(holder, record(holder, batch, blocks="chain"), [(0, blocks)])

    def calls_of(run: Callable[[], Any]) -> int:
        run()  # what is done once
        with cProfile.Profile() as profile:
            run()
        return sum(one.callcount for one in profile.getstats())

    alone = calls_of(lambda: holder(**batch))
    for key in (None, (1, 2, 3)):
        for is_users, each in ((False, 12), (True, 40)):  # attributes of all modules are looked at for a user's loss

            def run(key: Any = key, is_users: bool = is_users) -> None:
                split.run(0, LossRun(lambda: holder(**batch), is_users=is_users), [], key)

            assert calls_of(run) - alone < each * blocks + 400  # for each block, and around the call of the model


def test_a_forward_that_was_replaced_since() -> None:
    from fold3d.errors import TraceError

    model = plain()
    recorded = record(model, tokens())
    SplitModel(model, recorded, HALVES)
    layer = model.layers[1]
    layer.forward = functools.wraps(layer.forward)(lambda x: x)
    with pytest.raises(TraceError, match="already split, and its forward was replaced since"):
        SplitModel(model, recorded, HALVES)
