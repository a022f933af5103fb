"""SubPipeline: a micro-batch in two halves that take turns gives the whole one's loss, outputs and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fold3d.errors import Fold3dError
from fold3d.stage.micro_batch import Inputs, MicroBatch, loss_run
from fold3d.stage.split_model import SplitModel
from fold3d.stage.sub_pipeline import SubPipeline, sub_micro_batches
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.kept_exchanges import KeptRun
from fold3d.tensor_parallel.region import COPY, REDUCE, Exchange
from fold3d.trace import trace

KEY = (7, 3, 1)
VOCABULARY, LENGTH, LAYERS = 61, 8, 3


class Counting(TensorParallelGroup):
    """Of one rank: nothing is sent, but all turns are taken."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sums = 0
        self.order: list[int | None] = []

    def exchange_at_once(self, x: Tensor, how: Exchange, known: Tensor | None = None) -> Tensor:
        if known is None:
            self._count(how)
        return super().exchange_at_once(x, how, known)

    def start(self, x: Tensor, how: Exchange, move: str) -> Callable[[], Tensor]:
        self._count(how)
        return super().start(x, how, move)

    def _count(self, how: Exchange) -> None:
        if how == REDUCE:
            self.sums += 1
            self.order.append(self.turns.current)


def gpt2(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=LAYERS, n_head=2, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double().train()


def llama(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().train()


def with_regions(model: nn.Module, ops: Any) -> nn.Module:
    """A copy to the region and a sum at every linear layer of the blocks."""
    for name, module in model.named_modules():
        if (isinstance(module, nn.Linear | Conv1D) and ".h." in name) or (
            ".layers." in name and isinstance(module, nn.Linear)
        ):
            own = module.forward
            module.forward = lambda x, own=own: ops.exchange(own(ops.exchange(x, COPY)), REDUCE)
    return model


def batch(samples: int, *, ragged: bool = True) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = ids.clone()
    if ragged:
        labels[0, 3:] = -100
    return {"input_ids": ids, "labels": labels}


def token_loss(model: nn.Module, inputs: Inputs, reduction: str = "sum", kind: str = "") -> Tensor:
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none" if kind else reduction
    )
    if kind == "samples":
        return losses.view(len(labels), -1).sum(1).mean()
    if kind == "square":
        return losses.sum() ** 2
    return losses if not kind else losses.sum()


def run_chunks(
    model: nn.Module, split: SplitModel | WholeModel, chunks: int, run: Run, subs: list[SubPipeline]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch through all chunks and back; the loss and the gradients."""
    model.zero_grad()
    sent: list[Tensor] = []
    borders: list[tuple[list[Tensor], list[Tensor]]] = []
    micro_batch, result = run.micro_batch(model), None
    for chunk in range(chunks):
        received = [tensor.detach().requires_grad_() for tensor in sent]
        sent, result = through(split, chunk, micro_batch, received, subs[chunk] if subs else None)
        borders.append((received, sent))
    assert isinstance(result, Tensor)
    result.backward()
    for (_, outputs), (inputs, _) in zip(borders[-2::-1], borders[:0:-1], strict=True):
        torch.autograd.backward(outputs, [tensor.grad for tensor in inputs])
    return result.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def through(
    split: SplitModel | WholeModel,
    chunk: int,
    micro_batch: MicroBatch,
    received: list[Tensor],
    sub: SubPipeline | None,
) -> tuple[list[Tensor], Any]:
    """What a PipelineChunk does."""
    split.begin(micro_batch.loss, micro_batch.key)
    done = None if sub is None else sub.run(micro_batch, received)
    sent, output = done or split.forward(chunk, micro_batch.loss, received, micro_batch.key)
    last = isinstance(split, WholeModel) or split.is_last(chunk)
    return sent, split.end(micro_batch.loss, output) if last else None


@dataclass(frozen=True)
class Run:
    """A micro-batch and its loss."""

    inputs: Inputs
    loss: Callable[[nn.Module, Inputs], Any]

    def micro_batch(self, model: nn.Module) -> MicroBatch:
        """Returns one to be run."""
        return MicroBatch(self.inputs, loss_run(self.loss, model, self.inputs), KEY)


def apart(model: nn.Module, split: SplitModel | WholeModel, inputs: Inputs) -> Callable[[], SplitModel]:
    """What runs the blocks apart from the head."""
    if isinstance(split, SplitModel):
        return lambda: split
    recording = trace(model, example=inputs)
    return lambda: SplitModel(model, recording, [(0, len(recording.blocks))], beneath=split)


def compare(
    make: Callable[[], nn.Module],
    inputs: Inputs,
    loss: Callable[[nn.Module, Inputs], Tensor],
    *,
    chunks: int = 1,
    recompute: bool = False,
    expect: str = "",
    shares_sequence: bool = False,
) -> Counting:
    run, results = Run(inputs, loss), []
    ops = Counting()
    for halved in (False, True):
        model = with_regions(make(), ops)
        recording = trace(model, example=inputs)
        if chunks == 1:
            split: SplitModel | WholeModel = WholeModel(model, recording.blocks)
        else:
            ranges = [(i, i + 1) for i in range(chunks - 1)] + [(chunks - 1, LAYERS)]
            split = SplitModel(model, recording, ranges, recompute=recording.blocks if recompute else ())
        numbers = range(chunks if halved else 0)
        made = apart(model, split, inputs)
        subs = [SubPipeline(i, model, made, ops, shares_sequence=shares_sequence) for i in numbers]
        for _ in range(2):  # the first one compares, the second one trusts
            ops.sums, ops.order = 0, []
            results.append(run_chunks(model, split, chunks, run, subs))
        if halved and made() is not split:
            made().remove()
        split.remove()
        assert all(expect in sub.reason and bool(expect) == bool(sub.reason) for sub in subs[-1:]), subs[-1].reason
    (expected, gradients), *_ = results
    for found, others in results[1:]:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert others.keys() == gradients.keys()
        for name, gradient in others.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-11, msg=name)
    return ops


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("samples", [2, 5])
def test_exact(make: Callable[[float], nn.Module], dropout: float, chunks: int, samples: int) -> None:
    ops = compare(lambda: make(dropout), batch(samples), token_loss, chunks=chunks)
    assert set(ops.order) == {0, 1}, "nobody took turns"


@pytest.mark.parametrize("samples", [2, 5])
def test_three_parts_where_the_sequence_is_shared(samples: int) -> None:
    """The second one a turn behind the others."""
    ops = compare(lambda: llama(0.3), batch(samples), token_loss, chunks=2, shares_sequence=True)
    assert ops.order[:5] == ([0, 2, 0, 1, 2] if samples > 2 else [0, 1, 0, 1, 0])


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_recomputation_communicates_nothing(make: Callable[[float], nn.Module], recompute: bool) -> None:
    ops = compare(lambda: make(0.3), batch(4), token_loss, chunks=2, recompute=recompute)
    per_layer = 4 if make is gpt2 else 7
    assert ops.sums == 2 * LAYERS * per_layer


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("own_checkpoints", [False, True])
def test_a_chunk_that_runs_again_communicates_nothing(halved: bool, own_checkpoints: bool) -> None:
    ops, run_of = Counting(), Run(batch(4), token_loss)
    model = with_regions(gpt2(0.3), ops)
    split = WholeModel(model, trace(model, example=run_of.inputs).blocks)
    made = apart(model, split, run_of.inputs)
    if own_checkpoints:
        model.activation_checkpointing_enable({"use_reentrant": False})
    sub = SubPipeline(0, model, made, ops)

    def loss() -> Tensor:
        found: Tensor = through(split, 0, run_of.micro_batch(model), [], sub if halved else None)[1]
        return found

    def gradients(value: Tensor) -> list[Tensor]:
        model.zero_grad()
        value.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss()  # the first one compares
    ops.sums, ops.order = 0, []
    expected = loss()
    wanted, all_sums, turns = gradients(expected), ops.sums, ops.order
    run = KeptRun()
    with ops.kept.first(run):
        assert torch.equal(loss(), expected)
    kept = run.take()
    assert len(kept) == all_sums and set(turns) == ({0, 1} if halved else {None})
    run.give_back(kept)
    ops.sums = 0
    with ops.kept.again(run):
        again = loss()
    assert torch.equal(again, expected) and not run.take()
    for found, gradient in zip(gradients(again), wanted, strict=True):
        assert torch.equal(found, gradient)
    assert ops.sums == 0
    run.give_back(kept[:1])
    with (
        ops.kept.again(run),
        pytest.raises(Fold3dError, match="has more sums over its tensor-parallel group"),
    ):
        loss()


def contrast(model: nn.Module, inputs: Inputs) -> Tensor:
    last = model(input_ids=inputs["input_ids"]).logits[:, -1]
    return nn.functional.cross_entropy(last @ last.T, torch.arange(len(last)))


def weighed(model: nn.Module, inputs: Inputs) -> Tensor:
    labels = inputs.pop("labels")
    weight = torch.linspace(0.1, 3.0, VOCABULARY, dtype=torch.float64)
    logits = model(**inputs).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight)


LOSSES: dict[str, Callable[[nn.Module, Inputs], Tensor]] = {
    "samples": functools.partial(token_loss, kind="samples"),
    "sum": functools.partial(token_loss, kind="sum"),
    "mean": functools.partial(token_loss, reduction="mean"),
    "square": functools.partial(token_loss, kind="square"),
    "contrast": contrast,
    "class weights": weighed,
    "own": lambda model, inputs: model(**inputs).loss,
}


@pytest.mark.gate(cases=3)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_any_loss(loss: str, chunks: int) -> None:
    """No loss is divided."""
    ops = compare(lambda: gpt2(0.1), batch(5), LOSSES[loss], chunks=chunks)
    assert set(ops.order) == {0, 1}, "nobody took turns"


def test_another_form_is_compared_anew() -> None:
    """Blocks that do not mix samples in one form may do so in another."""
    model = gpt2(0.0)
    block = model.transformer.h[1]
    own = block.forward

    def mixes(hidden: Tensor, *args: Any, **named: Any) -> Any:
        out = own(hidden, *args, **named)
        return out - out.mean(0, keepdim=True) if hidden.shape[1] < LENGTH else out

    block.forward = mixes
    ops = Counting()
    with_regions(model, ops)
    inputs = batch(4, ragged=False)
    split = WholeModel(model, trace(model, example=inputs).blocks)
    sub = SubPipeline(0, model, apart(model, split, inputs), ops)
    for _ in range(2):
        through(split, 0, Run(inputs, token_loss).micro_batch(model), [], sub)
    assert not sub.reason
    masked = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    through(split, 0, Run({k: v[:, :5] for k, v in masked.items()}, token_loss).micro_batch(model), [], sub)
    assert "depends on the other samples" in sub.reason


@pytest.mark.parametrize("what", ["length", "weights", "attribute"])
def test_what_mixes_samples_later_is_found(what: str) -> None:
    """Room for so many tokens is taken up by longer ones, by weights that send more of them to one place, or by less of
    it."""
    model, room = gpt2(0.0), {"tokens": 4 * 5}
    block = model.transformer.h[1]
    block.room = 1000
    own = block.forward

    def mixes(hidden: Tensor, *args: Any, **named: Any) -> Any:
        out = own(hidden, *args, **named)
        place = torch.ones_like(out[..., :1]).flatten().cumsum(0).view_as(out[..., :1])
        return torch.where(place > min(room["tokens"], block.room), 0.0, out)

    block.forward = mixes
    ops = Counting()
    with_regions(model, ops)
    inputs = batch(4, ragged=False)
    split = WholeModel(model, trace(model, example=inputs).blocks)
    sub = SubPipeline(0, model, apart(model, split, inputs), ops)

    def run(length: int) -> None:
        ops.sums = 0
        through(split, 0, Run({k: v[:, :length] for k, v in inputs.items()}, token_loss).micro_batch(model), [], sub)

    for _ in range(4):
        run(5)
    divided = ops.sums
    if what == "attribute":
        block.room = 12
        run(5)
    elif what == "length":
        run(LENGTH)
        run(5)
        assert ops.sums == divided / 2, "micro-batches are whole"
    else:
        room["tokens"] = 12
        for _ in range(12):
            assert not sub.reason
            run(5)
    assert "depends on the other samples" in sub.reason


def test_a_gate_that_begins_at_zero_hides_nothing() -> None:
    """Its gradient would be that of the halves from the first step on."""

    def make() -> nn.Module:
        model = gpt2(0.0)
        block = model.transformer.h[1]
        block.gate = nn.Parameter(torch.zeros(16, dtype=torch.float64))
        own = block.mlp.forward

        def mixes(hidden: Tensor) -> Tensor:
            out: Tensor = own(hidden)
            return out + block.gate * out.mean(0)

        block.mlp.forward = mixes
        return model

    compare(make, batch(4), token_loss, expect="depends on the other samples")


def test_gradients_that_count_tokens_are_the_whole_ones() -> None:
    def make() -> nn.Module:
        model: Any = gpt2(0.0)
        model.transformer.wte.scale_grad_by_freq = True
        return model

    inputs = batch(4, ragged=False)
    inputs["input_ids"][:, :2] = 5
    compare(make, inputs, token_loss, expect="scale_grad_by_freq")


class Reading(transformers.GPT2LMHeadModel):
    """Its head reads what was embedded, if an attribute or the length says so."""

    reads = False
    long = 1 << 30

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        embedded = self.transformer.wte(input_ids)
        hidden = embedded
        for block in self.transformer.h:
            hidden = block(hidden)
        if self.reads or input_ids.shape[1] >= self.long:
            hidden = hidden + embedded
        return transformers.modeling_outputs.CausalLMOutput(logits=self.lm_head(self.transformer.ln_f(hidden)))


def test_a_head_that_reads_more_later() -> None:
    """By an attribute it takes another way, in parts, too; by the length it is refused."""
    model = gpt2(0.0)
    model.__class__ = Reading
    ops = Counting()
    with_regions(model, ops)
    inputs = batch(4, ragged=False)
    split = WholeModel(model, trace(model, example={"input_ids": inputs["input_ids"][:, :5]}).blocks)
    sub = SubPipeline(0, model, apart(model, split, {"input_ids": inputs["input_ids"][:, :5]}), ops)
    run = Run({name: value[:, :5] for name, value in inputs.items()}, token_loss)
    for reads in (False, True, True, False):
        model.reads = reads  # type: ignore[assignment]
        found = through(split, 0, run.micro_batch(model), [], sub)[1]
        torch.testing.assert_close(found, through(split, 0, run.micro_batch(model), [], None)[1], rtol=1e-12, atol=0)
    assert not sub.reason and {0, 1} <= set(ops.order)


@pytest.mark.parametrize("case", ["batch norm", "an attribute", "no tensor"])
def test_what_does_not_divide_stays_whole(case: str) -> None:
    def make() -> nn.Module:
        model = gpt2(0.0)
        if case == "an attribute":  # what it computes is read in the next micro-batch
            block, forward = model.transformer.h[0], model.transformer.h[0].mlp.forward
            block.mlp.forward = lambda x: remembers(block, forward(x))
            return model
        norm = nn.BatchNorm1d(LENGTH).double()
        model.transformer.h[1].norm = norm
        own = model.transformer.h[1].mlp.forward
        model.transformer.h[1].mlp.forward = lambda x: norm(own(x))
        return model

    if case == "no tensor":
        assert not divides({"input_ids": [1, 2]}) and not divides({"input_ids": torch.zeros(1, 4)})
        assert not divides({"a": torch.zeros(4, 2), "b": torch.zeros(3)})
        return
    compare(make, batch(4), token_loss, expect="changes attributes" if case == "an attribute" else "changes buffers")


def remembers(module: nn.Module, x: Tensor) -> Tensor:
    y = x + getattr(module, "mean", 0.0)
    module.mean = x.detach().mean()
    return y


def divides(inputs: Inputs) -> bool:
    """Whether anybody knows how to divide them."""
    return len(sub_micro_batches(inputs)) > 1


def test_dropout_in_a_reentrant_checkpoint_stays_whole() -> None:
    def make() -> nn.Module:
        model: Any = gpt2(0.3)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        return model

    compare(make, batch(4), token_loss, expect="reentrant")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_models_own_checkpoints(dropout: float) -> None:
    def make() -> nn.Module:
        model: Any = gpt2(dropout)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    ops = compare(make, batch(5), token_loss, chunks=2)
    assert ops.sums == 2 * LAYERS * 4


def test_an_error_in_one_half_ends_both() -> None:
    model = gpt2(0.0)
    ops, inputs = Counting(), batch(4)
    split = WholeModel(with_regions(model, ops), trace(model, example=inputs).blocks)
    sub = SubPipeline(0, model, apart(model, split, inputs), ops)
    block = model.transformer.h[1]
    own = block.mlp.forward
    left: list[int] = []

    def fails(*args: Any, **named: Any) -> Any:
        left.append(1)
        if torch.is_grad_enabled() and ops.turns.current == 0:
            raise ValueError("bad luck")
        return own(*args, **named)

    block.mlp.forward = fails
    with pytest.raises(ValueError, match="bad luck"):
        through(split, 0, Run(inputs, token_loss).micro_batch(model), [], sub)
    assert len(left) >= 2 and ops.turns.current is None and torch.is_grad_enabled()
    block.mlp.forward = own
    through(split, 0, Run(inputs, token_loss).micro_batch(model), [], sub)
    assert not sub.reason
