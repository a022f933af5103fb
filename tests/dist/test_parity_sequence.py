"""Where the ranks of a tensor-parallel group share the sequence, everything is as on one process, to 1e-10 in fp64.

Rows have 9 tokens, which are no equal parts for any group. It is the default, with which tests/dist/test_parity_tp.py
trains; here it is asked for.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import fold3d
from fold3d.engine.engine import Engine
from fold3d.errors import RankError
from fold3d.tensor_parallel.whole_results import LazyWhole
from tests.dist import parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import TOLERANCE, assert_all_names, assert_equal, assert_ranks_agree
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.splitting.models import Attention

reference = functools.cache(parity_jobs.train_alone)
Shared = functools.partial(Case, sequence_parallel=True)

GRID = [
    Shared(tp=2, m=2, family="opt", tp_overlap="sub", recompute=True),
    Shared(tp=4, m=1, family="gpt2-4", tp_overlap="none"),
    Shared(tp=2, pp=2, m=3, family="llama", tp_overlap="sub", labels="ragged", tied=False),
    Shared(tp=2, pp=2, segments=2, m=2, schedule="aiao", family="opt", tp_overlap="none", transport="c10d"),
    Shared(tp=2, pp=2, m=2, family="gpt2", tp_overlap="none", frozen=True),
    Shared(tp=2, pp=2, segments=2, m=3, family="llama", schedule="aiao", through="trainer", labels="ragged"),
]


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_training(ranks: RankPool, case: Case) -> None:
    expected = reference(case.alone())
    results = ranks.run(parity_jobs.train, case.ranks, case, timeout=150.0)
    assert_equal(results[0], expected, TOLERANCE[case.dtype])
    assert_all_names(results[0], parity_jobs.build(case))
    assert_ranks_agree(results, case)


def train_on_few_tokens(case: Case, tokens: int) -> list[float]:
    """Returns the losses of steps on the first tokens of each row, and of the next batch."""
    with parity_jobs.precision(case):
        engine = parity_jobs.engine_of(case)
        batches = [parity_jobs.batch_of(engine, case, step) for step in range(3)]
        short = [{name: value[:, :tokens] for name, value in batch.items()} for batch in batches]
        losses = [engine.step(batch).loss.item() for batch in short[:2]] + [engine.evaluate(short[2]).item()]
        engine.close()
    return losses


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        (Shared(tp=4, m=1, family="gpt2-4", tp_overlap="sub"), 3),
        (Shared(tp=4, m=1, family="mixture", recompute=True), 3),
        (Shared(tp=2, pp=2, m=2, family="bert"), 1),
        (Shared(tp=2, pp=2, m=2, family="opt", transport="c10d"), 2),
    ],
    ids=["gpt2", "mixture", "stages", "c10d"],
)
def test_sequences_shorter_than_there_are_ranks(ranks: RankPool, case: Case, tokens: int) -> None:
    """Some ranks have nothing of them, and send nothing to the next stage."""
    alone = replace(case, tp=1, pp=1, recompute=False, sequence_parallel="auto", tp_overlap="auto", transport="auto")
    expected = ranks.run(train_on_few_tokens, 1, alone, tokens, timeout=100.0)[0]
    for found in ranks.run(train_on_few_tokens, case.ranks, case, tokens, timeout=150.0):
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("family", "overlap", "recompute"),
    [("bert", "none", False), ("bert", "sub", True), ("opt", "sub", False), ("mixture", "none", True)],
)
def test_dropout_is_that_of_the_whole_sequence(ranks: RankPool, family: str, overlap: str, recompute: bool) -> None:
    """OPT's is of a tensor with samples and their sequences in one dimension."""
    case = Shared(tp=2, pp=2, m=2, family=family, dropout=0.2, tp_overlap=overlap, recompute=recompute)
    ours = ranks.run(parity_jobs.train, 4, case, timeout=150.0)
    whole = replace(case, tp=1, recompute=False, sequence_parallel=False, tp_overlap="auto")
    theirs = ranks.run(parity_jobs.train, 2, whole, timeout=150.0)
    assert_equal(ours[0], theirs[0], TOLERANCE["float64"])
    assert_ranks_agree(ours, case)


def train_on_one_micro_batch(case: Case, rows: int) -> parity_jobs.Result:
    """Trains with steps of one micro-batch of so many rows."""
    result = parity_jobs.Result()
    with parity_jobs.precision(case):
        engine = parity_jobs.engine_of(case, micro_batches=1)
        for step in range(3):
            batch = {name: value[:rows] for name, value in parity_jobs.batch_of(engine, case, step).items()}
            out = engine.step(batch)
            result.losses.append(out.loss.item())
            result.norms.append(out.grad_norm.item())
        result.weights = engine.state_dict()["model"]
        engine.close()
    return result


@pytest.mark.parametrize(
    "case",
    [
        Shared(tp=2, m=3, family="llama", labels="ragged"),
        Shared(tp=2, pp=2, m=3, family="bert", dropout=0.2, recompute=True),
        Shared(tp=4, m=3, family="mixture"),
    ],
    ids=["llama", "bert", "mixture"],
)
def test_three_parts_of_a_micro_batch_take_turns(ranks: RankPool, case: Case) -> None:
    """Of 5 rows the last part has one."""
    case = replace(case, tp_overlap="sub")
    ours = ranks.run(train_on_one_micro_batch, case.ranks, case, 5, timeout=150.0)
    alone = replace(case, tp=1, recompute=False, sequence_parallel="auto", tp_overlap="auto")
    expected = ranks.run(train_on_one_micro_batch, alone.ranks, alone, 5, timeout=150.0)[0]
    for found in ours:
        assert_equal(found, expected, TOLERANCE["float64"])


def look(case: Case) -> dict[str, Any]:
    """What blocks hand to each other, what hooks see of it, and what the model returns of it."""
    model = parity_jobs.build(case)
    seen: dict[str, Any] = {"between": [], "hooks": []}

    def hook(block: nn.Module, args: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        seen["between"].append((state.part() if isinstance(state, LazyWhole) else state).shape)
        seen["hooks"].append(state.shape)

    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    hooks = [block.register_forward_hook(hook) for block in blocks[::2]]
    engine = parity_jobs.engine_of(case, model, example=parity_jobs.replica_batch(case, 0, 0))
    hooks += [block.register_forward_hook(hook) for block in blocks[1::2]]
    for shapes in seen.values():
        shapes.clear()
    try:
        with parity_jobs.precision(case), torch.no_grad():
            batch = parity_jobs.batch_of(engine, case, 0)
            out = model(batch["input_ids"], output_hidden_states=True)
            seen["states"] = [state.clone() for state in out.hidden_states]
    finally:
        for hook in hooks:
            hook.remove()
        engine.close()
    return seen


def test_parts_between_blocks_are_whole_where_the_model_returns_them(ranks: RankPool) -> None:
    case = Shared(tp=2, m=1, family="llama")
    found = ranks.run(look, 2, case, timeout=100.0)
    alone = ranks.run(look, 1, replace(case, tp=1, sequence_parallel=False), timeout=100.0)[0]
    for rank, seen in enumerate(found):
        rows, hooked = ([shape[1] for shape in seen[what]] for what in ("between", "hooks"))
        assert rows == [5 - rank] * (case.layers - 1) + [9]
        assert hooked == [9] * case.layers
        for state, expected in zip(seen["states"], alone["states"], strict=True):
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-10)


class Weighing(nn.Module):
    """`ask`: what its own code does with the hidden states between its blocks."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.tokens, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(Attention() for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: Tensor, ask: str = "") -> dict[str, Any]:
        x = self.tokens(tokens)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x, _ = checkpoint(layer, x, use_reentrant=self.reentrant) if self.reentrant is not None else layer(x)
            if ask == "weigh":
                x = x * x.mean(1, keepdim=True).sigmoid()
            elif ask == "gate":  # where the block is left out so is the gate, and what stands for it is as long as x
                x = x * gate(x).sigmoid()
            elif ask == "write":
                x[:, 0] = 0.0
            elif ask == "scale":
                x.mul_(x.amax().detach().tanh())
            elif ask == "data":
                x.data[:, 0] = 0.0
            elif ask == "hook" and x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


def weigh(ask: str, layout: dict[str, Any], reentrant: bool | None = None) -> list[float]:
    """Returns the losses of steps and evaluations, recorded without and then with what the model is asked for."""
    torch.manual_seed(0)
    model = Weighing(reentrant).double()
    config = fold3d.ParallelConfig(micro_batches=2, **layout)
    tokens = torch.arange(2 * 2 * 7).view(4, 7) * 5 % 32
    engine = Engine(model, config, example={"tokens": tokens[:2]}, optimizer=functools.partial(SGD, lr=0.1))
    asked = {"tokens": tokens, "ask": ask}
    losses = [
        engine.step({"tokens": tokens}).loss,
        engine.step(asked).loss,
        engine.evaluate(asked),
        engine.step(asked).loss,
    ]
    assert "tp" not in layout or engine._built().cut.parts.plan.sequence
    engine.close()
    return [float(loss) for loss in losses]


ASKED = [
    *((ask, {"segments": 1}) for ask in ("weigh", "write", "scale", "data")),  # a model that is cut refuses what writes
    *(("hook", {"segments": 1, "recompute": recompute}) for recompute in (False, True)),
    *(("weigh", cut) for cut in ({"segments": 2}, {"pp": 2}, {"pp": 2, "segments": 2})),
    ("gate", {"segments": 2}),  # with pp its weights, which no recorded call needs, lie on one rank
]


@pytest.mark.parametrize(("ask", "cut"), ASKED, ids=str)
def test_code_between_blocks_that_reads_only_when_asked(ranks: RankPool, ask: str, cut: dict[str, Any]) -> None:
    """Nothing said so when the model was recorded, and its blocks were given parts of hidden states."""
    layout = {"tp": 2, "sequence_parallel": True, **cut}
    expected = weigh(ask, {"segments": 1})
    for losses in ranks.run(weigh, 2 * cut.get("pp", 1), ask, layout, timeout=100.0):
        assert losses == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_the_model_around_its_blocks(ranks: RankPool, reentrant: bool) -> None:
    expected = weigh("", {"segments": 1}, reentrant)
    for losses in ranks.run(
        weigh, 2, "", {"tp": 2, "sequence_parallel": True, "segments": 1}, reentrant, timeout=100.0
    ):
        assert losses == pytest.approx(expected, abs=1e-10)


def dropped(layout: dict[str, Any]) -> list[float]:
    """Returns losses of steps with dropout of attention in checkpoints of the model's own. As many samples as ranks: a
    sequence is then as long as samples times a rank's rows."""
    torch.manual_seed(0)
    model = models.build(models.MODELS["llama"](layers=2, dropout=0.3), dtype=torch.float64)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.arange(12).view(2, 6) % 7 + 2
    batch = {"input_ids": tokens, "labels": tokens}
    config = fold3d.ParallelConfig(micro_batches=1, segments=1, seed=5, **layout)
    engine = Engine(model, config, example=batch, optimizer=functools.partial(SGD, lr=0.5))
    losses = [float(engine.step(batch).loss) for _ in range(3)]
    engine.close()
    return losses


@pytest.mark.gate
def test_dropout_of_attention_in_checkpoints(ranks: RankPool) -> None:
    """It ended in step 1 for shapes such as these."""
    expected = dropped({})
    for losses in ranks.run(dropped, 2, {"tp": 2, "sequence_parallel": True}, timeout=100.0):
        assert losses == pytest.approx(expected, abs=1e-6)


def keep(layout: dict[str, Any]) -> list[float]:
    """Reads a hidden state that a hook has kept, when a longer batch has run."""
    torch.manual_seed(0)
    model, kept = Weighing().double(), list[Tensor]()
    tokens = torch.arange(16).view(2, 8)
    engine = Engine(model, fold3d.ParallelConfig(**layout), example={"tokens": tokens})
    model.layers[1].register_forward_hook(lambda module, args, output: kept.append(output[0]), prepend=True)
    for length in (7, 8):
        engine.evaluate({"tokens": tokens[:, :length]})
    sums = [float(state.square().sum()) for state in kept]
    engine.close()
    return sums


def test_a_hidden_state_that_is_kept_has_its_own_length(ranks: RankPool) -> None:
    expected = keep({"segments": 1})
    for sums in ranks.run(keep, 2, {"tp": 2, "sequence_parallel": True, "segments": 1}, timeout=100.0):
        assert sums == pytest.approx(expected, abs=1e-10)


def refuse(case: Case) -> str:
    model = parity_jobs.build(case)
    with pytest.raises((fold3d.ConfigError, RankError)) as raised:
        example = parity_jobs.replica_batch(case, 0, 0)
        parity_jobs.engine_of(case, model, tp_plan={"self_attn.*": "replicate"}, example=example)
    return str(raised.value)


def test_what_cannot_be_shared_is_refused_with_the_reason(ranks: RankPool) -> None:
    for text in ranks.run(refuse, 2, Shared(tp=2, m=1, family="llama"), timeout=100.0):
        assert "sequence_parallel=True" in text and "Set it to False" in text


def decline(case: Case, hooked: bool) -> tuple[bool, list[str]]:
    """Returns whether parts are shared, and what was said about it."""
    model, said = parity_jobs.build(case), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fold3d")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        if hooked and dist.get_rank() == 1:
            model.get_submodule("model.layers.2.mlp").register_forward_hook(lambda *_: None)
        engine = parity_jobs.engine_of(case, model, tp_plan=None if hooked else {"self_attn.*": "replicate"})
        engine.step(parity_jobs.batch_of(engine, case, 0))
        shared = bool(engine._built().cut.parts.plan.sequence)
        engine.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return shared, [text for text in said if "sequence_parallel" in text]


@pytest.mark.parametrize(("hooked", "why"), [(True, "model.layers.2.mlp"), (False, "model.layers.0")])
def test_auto_says_once_why_each_rank_has_the_whole(ranks: RankPool, hooked: bool, why: str) -> None:
    case = Case(tp=2, m=2, family="llama")
    (first, said), (second, others) = ranks.run(decline, 2, case, hooked, timeout=100.0)
    assert not first and not second and len(said) == 1 and not others
    assert why in said[0], said
