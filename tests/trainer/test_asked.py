"""What a loss function asks of a model that is cut, it gets, or an error before the first step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset

import fold3d
from tests.helpers import models
from tests.helpers.ranks import RankError, RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock

CUT = [(1, {"segments": 2}), (2, {"pp": 2})]


class Asks(Variant):
    """A compute_loss of one of several kinds."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        if self.kind == "attentions":  # which other implementations do not return
            named["model"].set_attn_implementation("eager")
        return named

    def trainer(self, base: type[Any]) -> type[Any]:
        kind = self.kind

        class Trainer(base):  # type: ignore[misc]
            loss_is_scaled_for_ga = False

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
                outputs, loss = LOSSES[kind](model, inputs)
                return (loss, outputs) if return_outputs else loss

            def training_step(self, *args: Any, **named: Any) -> Any:
                try:
                    return super().training_step(*args, **named)
                except BaseException:
                    assert self.state.global_step == 0, "the error comes before the first step"
                    raise

        return Trainer


def positions(model: Any, inputs: Any) -> Any:
    """Arguments that a plain recording has not, by position and by name."""
    ids = inputs["input_ids"]
    numbers = torch.arange(ids.shape[1]).flip(0).expand_as(ids)
    outputs = model(ids, attention_mask=inputs["attention_mask"], position_ids=numbers, labels=inputs["labels"])
    return outputs, outputs.loss


def logits(model: Any, inputs: Any) -> Any:
    outputs = model(input_ids=inputs["input_ids"], return_dict=False)
    return {"logits": outputs[0]}, outputs[0].square().mean()


def penalised(model: Any, inputs: Any) -> Any:
    """A loss that looks at its own gradient."""
    outputs = model(**inputs)
    loss = outputs.loss
    if torch.is_grad_enabled():
        (gradient,) = torch.autograd.grad(loss, outputs.logits, create_graph=True)
        loss = loss + gradient.square().sum()
    return outputs, loss


def early(model: Any, inputs: Any) -> Any:
    outputs = model(**inputs, output_hidden_states=True)
    return outputs, outputs.loss + outputs.hidden_states[1].square().mean()


def attentions(model: Any, inputs: Any) -> Any:
    outputs = model(**inputs, output_attentions=True)
    return outputs, outputs.loss + outputs.attentions[0].square().mean()


def twice(model: Any, inputs: Any) -> Any:
    outputs = model(**inputs)
    return outputs, outputs.loss + model(**inputs).logits.square().mean()


def captured(model: Any, inputs: Any) -> Any:
    """What a hook keeps of a layer inside of the first block; an interrupted step leaves none."""
    kept: list[Tensor] = []
    handle = model.transformer.h[0].mlp.register_forward_hook(lambda module, args, output: kept.append(output))
    try:
        outputs = model(**inputs)
    finally:
        handle.remove()
    return outputs, outputs.loss + sum(one.square().mean() for one in kept)


def detached(model: Any, inputs: Any) -> Any:
    outputs = model(**inputs)
    return outputs, outputs.loss.detach()


def elsewhere(model: Any, inputs: Any) -> Any:
    """Calls no model."""
    return {}, torch.ones((), requires_grad=True)


LOSSES = {
    one.__name__: one for one in (positions, logits, penalised, early, attentions, twice, captured, detached, elsewhere)
}
ARGUMENTS = {"per_device_train_batch_size": 4, "prediction_loss_only": True}


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("processes", "layout"), CUT, ids=["segments=2", "pp=2"])
@pytest.mark.parametrize("kind", ["positions", "logits", "penalised", "early", "attentions"])
def test_right(ranks: RankPool, tmp_path: Path, kind: str, processes: int, layout: dict[str, Any]) -> None:
    job = Job(str(tmp_path), variant=Asks(kind), arguments=ARGUMENTS)
    assert_same(ranks.run(run_fold3d, processes, job, layout)[0], run_stock(job), 1e-10)


class Predicts(Asks):
    """And predicts one batch: weights of sequences of other lengths could not be put into one tensor."""

    def after(self, trainer: Any) -> Any:
        trainer.args.prediction_loss_only = False
        found = trainer.predict(
            Subset(trainer.eval_dataset, range(trainer.args.per_device_eval_batch_size))
        ).predictions
        return [torch.as_tensor(one) for one in tree_leaves(found)]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("early", {}),
        ("attentions", {}),
        pytest.param("attentions", {"tp_overlap": "sub"}, marks=pytest.mark.gate),
        ("attentions", {"recompute": True}),
    ],
    ids=str,
)
def test_right_of_ranks_that_share_blocks(ranks: RankPool, tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
    """Whole hidden states, and the attention weights of all heads. The model's own loss is in single precision."""
    job = Job(str(tmp_path), variant=Predicts(kind), arguments=ARGUMENTS)
    ours, stock = ranks.run(run_fold3d, 2, job, {"tp": 2, **how})[0], run_stock(job)
    assert_same(ours, stock, 1e-6)
    assert len(ours.extra) == len(stock.extra) > 2
    for mine, theirs in zip(ours.extra, stock.extra, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("processes", "layout"), CUT, ids=["segments=2", "pp=2"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("twice", "calls the model a second time .* set pp=1 and segments=1"),
        (
            "captured",
            "a hook of transformer.h.0.mlp keeps (of a layer that|a tensor).*Set pp=1",
        ),
        ("detached", "the loss has no gradient: it was detached"),
        ("elsewhere", "the loss function returned without calling the model.* set pp=1 and segments=1"),
    ],
)
def test_refused(
    ranks: RankPool, tmp_path: Path, kind: str, message: str, processes: int, layout: dict[str, Any]
) -> None:
    job = Job(str(tmp_path), variant=Asks(kind), arguments=ARGUMENTS)
    with pytest.raises(RankError) as refused:
        ranks.run(run_fold3d, processes, job, layout)
    for text in refused.value.failures.values():
        assert re.search(message, text, re.DOTALL), text


class Sums(nn.Module):
    """`early=True` adds what the first block returned; `names` may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.extra = nn.Linear(4, 4)

    def forward(self, x: Tensor, early: bool = False, doubled: bool = False) -> Tensor:
        first = None
        for layer in self.layers:
            x = layer(x).tanh()
            first = x if first is None else first
        if doubled:
            x = self.extra(x)
        return (x + first).mean() if early and first is not None else x.mean()


@pytest.mark.full
def test_forms_that_come_later() -> None:
    """In an evaluation, too: recorded when they come, and what crosses the border in them is what they need."""
    torch.manual_seed(0)
    model, x = Sums().double(), torch.randn(4, 4, dtype=torch.float64)
    expected = {doubled: model(x, doubled=doubled).item() for doubled in (False, True)}
    engine = fold3d.Engine(model, fold3d.ParallelConfig(segments=2, blocks="layers"), example={"x": x})
    for doubled in (False, True, False):
        found = engine.forward({"x": x}, lambda model, batch, doubled=doubled: model(batch["x"], doubled=doubled))
        assert found.item() == pytest.approx(expected[doubled], rel=1e-14)
    found = engine.forward({"x": x}, lambda model, batch: model(early=True, **batch))
    assert found.item() == pytest.approx(model(x, early=True).item(), rel=1e-14)
    engine.close()


class Uneven(nn.Module):
    """The longer the sequence, the more of the cost lies in the blocks; else it lies in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.head = nn.Linear(4, 256)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + (x @ x.transpose(1, 2)).softmax(-1) @ x)
        return self.head(x).square().mean()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + (x @ x.transpose(1, 2)).softmax(-1) @ self.inner(x)
        return mixed


def cut_by_replicas() -> list[tuple[int, int]]:
    torch.manual_seed(0)
    model = Uneven()
    model.layers = nn.ModuleList(Attending() for _ in range(5))
    engine = fold3d.Engine(model, fold3d.ParallelConfig(segments=2, blocks="layers"))
    x = torch.ones(1, 4 if engine.topology.dp_rank == 0 else 512, 4)
    engine.run([{"x": x}], lambda model, batch: model(**batch))
    ranges = list(engine.strategy.ranges)
    engine.close()
    return ranges


def test_replicas_whose_first_micro_batches_would_be_cut_differently(ranks: RankPool) -> None:
    found = ranks.run(cut_by_replicas, 2)
    assert found[0] == found[1]


@pytest.mark.full
def test_models_are_called_by_position_and_directly() -> None:
    plain = models.build_plain(dtype=torch.float64)
    ids = torch.arange(10).reshape(2, 5)
    expected = plain(ids, ids).item()
    engine = fold3d.Engine(plain, fold3d.ParallelConfig(segments=2))
    assert engine.forward({"ids": ids}, lambda m, b: m.forward(b["ids"], labels=b["ids"])).item() == expected
    assert engine.forward({"ids": ids}, lambda m, b: m(b["ids"], b["ids"])).item() == expected
    engine.close()
