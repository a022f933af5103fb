"""Chunked cross-entropy: the model's own loss, and its gradients, without the logits of all tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fold3d
from fold3d import _C
from fold3d.errors import ConfigError
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.tensor_parallel.vocabulary.chunked_loss import DeferredLogits, install_chunked_loss
from fold3d.trace import trace
from fold3d.trace.coat import Coat
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.tensor_parallel.vocabulary.test_logits import Squares

VOCABULARY, WIDTH, CHUNK = 96, 16, 5


def build() -> Any:
    config = models.llama_config(layers=4, vocab=VOCABULARY)
    return models.build(config, dtype=torch.float64)


def batch(rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    labels[0, :4] = labels[2] = -100
    return {"input_ids": ids, "labels": labels}


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most rows of logits that an operation has returned."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.shape[-1:] == (VOCABULARY,):
                weight = leaf.shape == (WIDTH, VOCABULARY)
                self.rows = max(self.rows, 0 if weight else leaf.numel() // VOCABULARY)
        return result


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("items", [None, 40])
def test_the_models_own_loss_is_the_same_in_chunks(items: int | None) -> None:
    model, given = build(), batch()
    named: dict[str, Any] = {} if items is None else {"num_items_in_batch": items}
    wanted = model(**given, **named).loss
    wanted.backward()
    expected = gradients(model)
    model.zero_grad()
    coat = Coat()
    install_chunked_loss(coat, model, CHUNK)
    largest = Largest()
    with largest:
        output = model(**given, **named)
        output.loss.backward()
    assert largest.rows == CHUNK
    torch.testing.assert_close(output.loss, wanted, rtol=1e-6, atol=0)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-9, msg=name)
    assert isinstance(output.logits, DeferredLogits) and output.logits.shape == (3, 11, VOCABULARY)
    coat.close()
    assert not isinstance(model(**given).logits, DeferredLogits)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def each(logits: Tensor, labels: Tensor) -> Tensor:
    found = functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.view(-1), reduction="none")
    return (found * torch.arange(len(found))).sum()


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    cut = logits[..., :-1, :].contiguous().double()
    return nn.CrossEntropyLoss(label_smoothing=0.1)(cut.view(-1, cut.size(-1)), labels[..., 1:].reshape(-1))


def by_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).mean()


def some_entries(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[..., : VOCABULARY - 1].flatten(0, 1), labels.clamp(0, 9).flatten())


@pytest.mark.parametrize(
    "loss, chunked", [(mean, True), (each, True), (shifted, True), (by_softmax, False), (some_entries, False)]
)
def test_losses_of_others(
    loss: Callable[[Tensor, Tensor], Tensor], chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What is no cross-entropy of whole rows gets all logits, with their gradient, and the log says so once."""
    model, given = build(), batch()
    labels = given.pop("labels")
    wanted = loss(model(**given).logits, labels)
    wanted.backward()
    expected = gradients(model)
    model.zero_grad()
    install_chunked_loss(Coat(), model, CHUNK)
    largest = Largest()
    with largest, caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.zero_grad()
            found = loss(model(**given).logits, labels)
            found.backward()
    assert (largest.rows <= CHUNK) == chunked
    assert ("chunked_loss=5 saves nothing" in caplog.text) == (not chunked)
    assert caplog.text.count("needs the logits of all tokens") == (0 if chunked else 1)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


def test_evaluation_has_logits() -> None:
    model = build()
    install_chunked_loss(Coat(), model, CHUNK)
    with torch.no_grad():
        assert type(model(**batch()).logits) is Tensor
    assert type(model.eval()(**batch()).logits) is Tensor


def test_a_model_without_a_head() -> None:
    with pytest.raises(ConfigError, match="chunked_loss=5: Linear has no output head"):
        install_chunked_loss(Coat(), nn.Linear(2, 2), CHUNK)
    with pytest.raises(ConfigError, match="chunked_loss=0: must be an integer of at least 1"):
        fold3d.ParallelConfig(chunked_loss=0)


def peak_of_loss(tokens: int | None, vocabulary: int, length: int) -> tuple[int, int]:
    """Returns the most bytes of tensors in a forward and a backward, beside what was there before; and the logits'."""
    model = models.build(models.llama_config(layers=1, vocab=vocabulary))
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1))
    if tokens is not None:
        install_chunked_loss(Coat(), model, tokens)
    assert _C.count_cpu_bytes(True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    _C.reset_peak_cpu_bytes()
    before = _C.peak_cpu_bytes()
    model(input_ids=ids, labels=ids).loss.backward()
    return _C.peak_cpu_bytes() - before, 4 * vocabulary * length


def test_memory() -> None:
    """Of what the whole loss needs, a chunk of an eighth of the tokens leaves less than a third."""
    whole, logits = peak_of_loss(None, 8192, 64)
    chunked, _ = peak_of_loss(8, 8192, 64)
    assert whole > 3 * logits
    assert chunked < logits


def train(layout: dict[str, Any], with_loss: bool = True) -> tuple[list[float], dict[str, Tensor]]:
    """Returns losses and norms of three steps, and the weights behind them; every rank calls."""
    torch.manual_seed(0)
    model = build()
    config = fold3d.ParallelConfig(micro_batches=3, **layout)
    engine = fold3d.Engine(model, config, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), max_grad_norm=1.0)
    found = []
    for _ in range(3):
        output = engine.step(batch(rows=6))
        found += [float(output.loss), float(output.grad_norm)]
    weights = engine.state_dict()["model"]
    engine.close()
    return found, weights


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    "layout", [{"pp": 2, "segments": 2}, {"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 2, "schedule": "zb_h1"}], ids=str
)
def test_layouts(ranks: RankPool, layout: dict[str, Any]) -> None:
    processes = layout.get("tp", 1) * layout.get("pp", 1)
    wanted, expected = ranks.run(train, 1, {})[0]
    for found, weights in ranks.run(train, processes, layout | {"chunked_loss": CHUNK}):
        assert found == pytest.approx(wanted, rel=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


def test_the_planner_counts_it() -> None:
    """Of what is predicted for the head without it, the logits are gone."""
    model = models.build(models.llama_config(layers=2, vocab=4096))
    ids = torch.arange(64).view(1, 64)
    given = {"input_ids": ids, "labels": ids}
    recording = trace(model, example=given)
    whole = layer_bytes(model, recording, given)[-1]
    chunked = layer_bytes(model, recording, given, prepare=lambda copied: install_chunked_loss(Coat(), copied, 8))[-1]
    logits = 4 * 4096 * 64
    assert whole.saved >= logits > 2 * chunked.saved
    assert whole.backward > 2 * logits and chunked.backward < whole.backward / 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits: Squares.apply(logits),
        lambda logits: torch.vmap(lambda row: row.square().mean())(logits).mean(),
        lambda logits: torch.utils.checkpoint.checkpoint(lambda x: x.square().mean(), logits, use_reentrant=True),
    ],
    ids=["Function", "vmap", "checkpoint"],
)
def test_gradients_are_never_lost(loss: Callable[[Tensor], Tensor]) -> None:
    model, given = build(), batch()
    install_chunked_loss(Coat(), model, CHUNK)
    found = loss(model(**given).logits)
    with pytest.raises(ConfigError, match="where nobody sees it"):
        found.backward()


def watched(logits: Tensor) -> Tensor:
    with torch.no_grad():
        seen = logits.logsumexp(-1).mean()
    return logits.logsumexp(-1).square().mean() + 0 * seen


def hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient * 0.5)
    return functional.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten())


@pytest.mark.parametrize("loss", [watched, hooked])
def test_what_is_looked_at_first_and_hooks(loss: Callable[[Tensor], Tensor]) -> None:
    model, given = build(), batch()
    loss(model(**given).logits).backward()
    expected = gradients(model)
    model.zero_grad()
    install_chunked_loss(Coat(), model, CHUNK)
    loss(model(**given).logits).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-9, msg=name)
