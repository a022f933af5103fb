"""Unmodified models with a vocabulary in parts: loss and gradients are those of the whole, no rank has whole logits."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fold3d.sharding.vocabulary import find_vocabulary
from fold3d.tensor_parallel.vocabulary import VocabularyParallelLogits, install_vocabulary
from fold3d.trace import trace
from fold3d.trace.coat import Coat
from tests.helpers.ranks import RankPool
from tests.tensor_parallel.vocabulary import jobs
from tests.tensor_parallel.vocabulary.emulated import NothingWhole, ThreadedOps, on_ranks
from tests.tensor_parallel.vocabulary.jobs import V, batch, build, cut, exact_loss, stock_loss

FAMILIES = ["gpt2", "llama", "llama_tied", "opt", "bert", "gemma2", "gemma3", "gpt_j", "mpt"]


def compare(family: str, size: int, loss_of: Callable[..., Tensor], tolerance: float, *, whole: bool = False) -> None:
    model, inputs = build(family), batch(family)
    vocabulary = find_vocabulary(model, trace(model), size)
    assert vocabulary.embeddings and vocabulary.heads

    def run(ops: ThreadedOps) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        cut(own, vocabulary, ops.rank)
        kinds = [type(module) for module in own.modules()]
        coat = Coat()
        install_vocabulary(coat, own, vocabulary, ops)
        with contextlib.nullcontext() if whole else NothingWhole(V):
            loss = loss_of(own, inputs)
            loss.backward()
        assert kinds == [type(module) for module in own.modules()]
        coat.close()
        assert not [module for module in own.modules() if "forward" in vars(module)]
        return {"loss": loss.detach(), **{name: p.grad for name, p in own.named_parameters() if p.grad is not None}}

    results = on_ranks(size, run)
    jobs.check(model, inputs, loss_of, vocabulary, results, tolerance)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    compare(family, 2, exact_loss, 1e-12)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_loss(family: str) -> None:
    compare(family, 3, stock_loss, 1e-6)


@pytest.mark.parametrize("family", ["llama_tied", "bert"])
def test_four_ranks(family: str) -> None:
    compare(family, 4, exact_loss, 1e-12)


def test_a_loss_of_the_users_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compare("llama", 2, jobs.confident_loss, 1e-12, whole=True)
    assert [record.getMessage().split("'")[1] for record in caplog.records] == ["topk"]


def test_evaluation_returns_logits_in_parts_that_are_whole_when_read() -> None:
    model, inputs = build("llama").eval(), batch("llama")
    vocabulary = find_vocabulary(model, trace(model), 2)
    with torch.no_grad():
        wanted = model(**inputs)

    def run(ops: ThreadedOps) -> None:
        own = copy.deepcopy(model)
        cut(own, vocabulary, ops.rank)
        install_vocabulary(Coat(), own, vocabulary, ops)
        with torch.no_grad():
            outputs = own(**inputs)
        assert isinstance(outputs.logits, VocabularyParallelLogits)
        torch.testing.assert_close(outputs.loss, wanted.loss, rtol=0, atol=1e-6)
        torch.testing.assert_close(outputs.logits.argmax(-1), wanted.logits.argmax(-1))
        torch.testing.assert_close(torch.tensor(outputs.logits.tolist()).double(), wanted.logits, rtol=0, atol=1e-6)

    on_ranks(2, run)


def test_ids_that_are_no_entries() -> None:
    model = build("llama")
    vocabulary = find_vocabulary(model, trace(model), 2)

    def run(ops: ThreadedOps) -> None:
        own = copy.deepcopy(model)
        cut(own, vocabulary, ops.rank)
        install_vocabulary(Coat(), own, vocabulary, ops)
        with pytest.raises(IndexError, match=f"index {V} is out of range"):
            own(input_ids=torch.tensor([[1, V]]))

    on_ranks(2, run)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("size", [2, 4])
def test_real_processes(ranks: RankPool, family: str, size: int) -> None:
    model, inputs = build(family), batch(family)
    vocabulary = find_vocabulary(model, trace(model), size)
    results = ranks.run(jobs.train_once, size, family, timeout=120.0)
    jobs.check(model, inputs, exact_loss, vocabulary, [exact for exact, _ in results], 1e-12)
    jobs.check(model, inputs, stock_loss, vocabulary, [stock for _, stock in results], 1e-6)
