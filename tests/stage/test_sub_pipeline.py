"""SubPipeline: a micro-batch in two halves that take turns gives the whole one's loss, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fold3d.errors import Fold3dError
from fold3d.stage.micro_batch import Inputs, MicroBatch
from fold3d.stage.sharded.sub_micro_batches import sub_micro_batches
from fold3d.stage.sharded.sub_pipeline import SubPipeline
from fold3d.stage.split_model import SplitModel
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.kept.kept_run import KeptRun
from fold3d.tensor_parallel.kept.kept_sums import KeptSums
from fold3d.tensor_parallel.sub_pipelined.turning_ops import TurningOps
from fold3d.tensor_parallel.sub_pipelined.turns import Turns
from fold3d.trace import trace

KEY = (7, 3, 1)
VOCABULARY, LENGTH, LAYERS = 61, 8, 3


class Counting(TurningOps):
    """Of a group of one rank: nothing is sent, but all turns are taken."""

    def __init__(self) -> None:
        super().__init__(TensorParallelGroup(None), Turns())
        self.sums = 0
        self.order: list[int | None] = []

    def reduce_from_region(self, y: Tensor) -> Tensor:
        self.sums += 1
        self.order.append(self.turns.current)
        return super().reduce_from_region(y)


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
            module.forward = lambda x, own=own: ops.reduce_from_region(own(ops.copy_to_region(x)))
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
    model: nn.Module, split: SplitModel | WholeModel, chunks: int, micro_batch: MicroBatch, subs: list[SubPipeline]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch through all chunks and back; the loss and the gradients."""
    model.zero_grad()
    sent: list[Tensor] = []
    borders: list[tuple[list[Tensor], list[Tensor]]] = []
    result: Any = None
    for chunk in range(chunks):
        received = [tensor.detach().requires_grad_() for tensor in sent]
        done = subs[chunk].run(micro_batch, received) if subs else None
        if done is None:
            done = split.run(chunk, lambda: micro_batch.run(model), received, micro_batch.key)
        sent, result = done
        borders.append((received, sent))
    result.backward()
    for (_, outputs), (inputs, _) in zip(borders[-2::-1], borders[:0:-1], strict=True):
        torch.autograd.backward(outputs, [tensor.grad for tensor in inputs])
    return result.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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
    micro_batch = MicroBatch(inputs, loss, KEY)
    results = []
    ops = Counting()
    for halved in (False, True):
        model = with_regions(make(), KeptSums(ops))
        if chunks == 1:
            split: SplitModel | WholeModel = WholeModel(model, [])
        else:
            recording = trace(model, example=inputs)
            ranges = [(i, i + 1) for i in range(chunks - 1)] + [(chunks - 1, LAYERS)]
            split = SplitModel(model, recording, ranges, recompute=recording.blocks if recompute else ())
        numbers = range(chunks if halved else 0)
        subs = [SubPipeline(i, model, split, ops, shares_sequence=shares_sequence) for i in numbers]
        for _ in range(2):  # the first one compares, the second one trusts
            ops.sums, ops.order = 0, []
            results.append(run_chunks(model, split, chunks, micro_batch, subs))
        split.remove()
        assert all(expect in sub.reason and bool(expect) == bool(sub.reason) for sub in subs[-1:])
    (expected, gradients), *_ = results
    for found, others in results[1:]:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert others.keys() == gradients.keys()
        for name, gradient in others.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-11, msg=name)
    return ops


@pytest.mark.gate(cases=4)
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


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("own_checkpoints", [False, True])
def test_a_chunk_that_runs_again_communicates_nothing(halved: bool, own_checkpoints: bool) -> None:
    ops, micro_batch = Counting(), MicroBatch(batch(4), token_loss, KEY)
    sums = KeptSums(ops, ops.turns)
    model = with_regions(gpt2(0.3), sums)
    if own_checkpoints:
        model.activation_checkpointing_enable({"use_reentrant": False})
    split = WholeModel(model, [])
    sub = SubPipeline(0, model, split, ops)

    def loss() -> Tensor:
        done = sub.run(micro_batch, []) if halved else None
        made: Tensor = (done or split.run(0, lambda: micro_batch.run(model), [], KEY))[1]
        return made

    def gradients(value: Tensor) -> list[Tensor]:
        model.zero_grad()
        value.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss()  # the first one compares
    ops.sums, ops.order = 0, []
    expected = loss()
    wanted, all_sums, turns = gradients(expected), ops.sums, ops.order
    run = KeptRun()
    with sums.first(run):
        assert torch.equal(loss(), expected)
    kept = run.take()
    assert len(kept) == all_sums and set(turns) == ({0, 1} if halved else {None})
    run.give_back(kept)
    ops.sums = 0
    with sums.again(run):
        again = loss()
    assert torch.equal(again, expected) and not run.take()
    for found, gradient in zip(gradients(again), wanted, strict=True):
        assert torch.equal(found, gradient)
    assert ops.sums == 0
    run.give_back(kept[:1])
    with (
        sums.again(run),
        pytest.raises(Fold3dError, match="has more sums over its tensor-parallel group"),
    ):
        loss()


@pytest.mark.parametrize("kind", ["samples", "sum"])
def test_kinds_of_losses(kind: str) -> None:
    compare(lambda: gpt2(0.1), batch(5), lambda model, inputs: token_loss(model, inputs, kind=kind))


def test_the_models_own_mean_over_labels() -> None:
    compare(lambda: gpt2(0.0), batch(5), lambda model, inputs: token_loss(model, inputs, "mean"))


def test_a_mean_over_labels_that_becomes_ragged() -> None:
    """Two kinds of losses fit the first micro-batch; the second tells them apart, and is compared again."""
    model = gpt2(0.0)
    ops = Counting()
    split = WholeModel(with_regions(model, KeptSums(ops)), [])
    sub = SubPipeline(0, model, split, ops)
    for ragged in (False, True, True):
        micro_batch = MicroBatch(batch(4, ragged=ragged), lambda m, i: token_loss(m, i, "mean"), KEY)
        done = sub.run(micro_batch, [])
        assert done is not None
        torch.testing.assert_close(done[1], micro_batch.run(model), rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", ["square", "batch norm", "no tensor", "contrast"])
def test_what_does_not_divide_stays_whole(case: str) -> None:
    def make() -> nn.Module:
        model = gpt2(0.0)
        if case == "batch norm":
            norm = nn.BatchNorm1d(LENGTH).double()
            model.transformer.h[1].mlp.register_forward_hook(lambda *args: norm(args[-1]))
            model.transformer.h[1].norm = norm
        return model

    def loss(model: nn.Module, inputs: Inputs) -> Any:
        if case == "contrast":
            last = model(input_ids=inputs["input_ids"]).logits[:, -1]
            return nn.functional.cross_entropy(last @ last.T, torch.arange(len(last)))
        return token_loss(model, inputs, kind="square" if case == "square" else "sum")

    if case == "no tensor":
        assert halves_of({"input_ids": [1, 2]}) and halves_of({"input_ids": torch.zeros(1, 4)})
        assert halves_of({"a": torch.zeros(4, 2), "b": torch.zeros(3)})
        return
    reason = "changes buffers" if case == "batch norm" else "its loss"
    compare(make, batch(4), loss, expect=reason)


def halves_of(inputs: Inputs) -> bool:
    """Whether nobody knows how to divide them."""
    return sub_micro_batches(MicroBatch(inputs, lambda *_: None, KEY)) is None


def test_a_batch_norm_changes_its_statistics_once() -> None:
    model = gpt2(0.0)
    model.transformer.h[1].norm = norm = nn.BatchNorm1d(LENGTH).double()
    model.transformer.h[1].mlp.register_forward_hook(lambda *args: norm(args[-1]))
    ops = Counting()
    split = WholeModel(with_regions(model, KeptSums(ops)), [])
    micro_batch = MicroBatch(batch(4), token_loss, KEY)
    assert SubPipeline(0, model, split, ops).run(micro_batch, []) is None
    assert int(norm.num_batches_tracked) == 0


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
    ops = Counting()
    split = WholeModel(with_regions(model, KeptSums(ops)), [])
    sub = SubPipeline(0, model, split, ops)
    left: list[int] = []

    def loss(model: nn.Module, inputs: Inputs) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            try:
                result = token_loss(model, inputs)
            finally:
                left.append(1)
            if torch.is_grad_enabled() and ops.turns.current == 0:
                raise ValueError("bad luck")
            return result

    with pytest.raises(ValueError, match="bad luck"):
        sub.run(MicroBatch(batch(4), loss, KEY), [])
    assert len(left) == 3 and ops.turns.current is None and torch.is_grad_enabled()
    assert sub.run(MicroBatch(batch(4), token_loss, KEY), []) is not None
