"""A divided block whose code takes another way later: it is proved again, or refused, before a weight moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d._C import NumberSet, OperatorRun, note_product, swap_operator_run
from fold3d.tensor_parallel.operators import Operators, OperatorWatch, of_fold3d
from tests.helpers.ranks import RankPool
from tests.tensor_parallel.stacks import loss_of, made

WIDTH, SAMPLES = 8, 3


OF_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of others": lambda x: x.mean(-1, keepdim=True),
    "norm of others": lambda x: x.norm(dim=-1, keepdim=True),
    "cumsum of others": lambda x: x.cumsum(-1)[..., -1:],
    "topk of others": lambda x: x.topk(2, -1).values.sum(-1, keepdim=True),
}
"""Of the whole input at first, later of the neurons, of which a rank has a part: the same operators in one order."""


def _size(h: Tensor) -> Tensor:
    return h.norm(dim=-1, keepdim=True)


def _masked(numbers: Tensor) -> Tensor:
    """Without the first token."""
    first = torch.arange(numbers.shape[1])[:, None] == 0
    return numbers.masked_fill(first, torch.finfo(torch.float32).min)


LIMITS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "limit": lambda x, h, limit: torch.where(_size(x) > limit, h * 0.5, h),
    "limit of all": lambda x, h, limit: torch.where(_size(x) > limit, h * 0.5, h),
    "limit in place": lambda x, h, limit: h * (1 - 0.5 * _size(x).detach().clone().gt_(limit)),
    "limit of whole numbers": lambda x, h, limit: h / (1 + (_size(x) / limit).long()),
    "limit of indices": lambda x, h, limit: (
        h / (1 + torch.cat([_size(x), _size(x) * 0 + limit], -1).min(-1).indices)[..., None]
    ),
    "limit of a count": lambda x, h, limit: torch.where((x > 0).sum(-1, keepdim=True) > 31, 0.5 * h, h),
    "any of many": lambda x, h, limit: torch.where((x > limit).any(-1, keepdim=True), 0.5 * h, h),
    "many of them": lambda x, h, limit: h / (1 + ((x > limit).double().mean(-1, keepdim=True) > 0.3).to(h.dtype)),
    "behind a mask": lambda x, h, limit: torch.where(_masked(_size(x)) > limit, 0.5 * h, h),
    "of what is masked": lambda x, h, limit: h - h.detach() + _masked(h).clamp(min=-1.0).detach(),
    "parts of other widths": lambda x, h, limit: h * (h[..., ::2] > 0).repeat_interleave(2, -1),
}
"""Of a norm of the neurons, of which a rank has a part, and which the numbers of a proof do not reach."""


class Block(nn.Module):
    """A feed-forward network, and what a batch, or somebody who sets `on`, can switch on in it."""

    seen: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.on, self.limit = kind, False, 1e9
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH) if kind in ("either", "experts") else None
        self.register_buffer("seen", torch.zeros(4 * WIDTH) if kind == "buffer" else torch.zeros(()))

    def forward(self, x: Tensor, switched_on: Tensor) -> Tensor:
        on = self.on or bool(switched_on.any())
        h = self.up(x).relu()
        if on and self.kind == "mean":
            h = h - h.mean(-1, keepdim=True)
        if self.kind == "dim":
            h = h + h.softmax(-1 if on else 1)
        if on and self.kind == "root":
            h = (h + 1).sqrt()
        if self.kind in LIMITS:
            h = LIMITS[self.kind](x if self.kind == "limit of all" else h, h, self.limit)
        if self.kind == "limit over tokens":
            size = x.flatten(1).norm(dim=1)
            x = x * (self.limit / size).clamp(max=1.0)[:, None, None]
        if self.kind == "experts":
            for expert in (self.up, self.gate):
                chosen = (x.sum(-1, keepdim=True) > 0) == (expert is self.up)
                if chosen.any():
                    h = h + chosen * expert(x).tanh()  # type: ignore[misc]
        if on and self.kind == "buffer":
            h = h - self.seen
        if self.kind == "either":  # both have the same neurons
            assert self.gate is not None
            a, b = h.tanh(), self.gate(x).relu().tanh()
            h = (b if on else a).square() + 0.1 * a.sin() + 0.1 * b.sin()
        y = self.down(h)
        if on and self.kind == "tokens":
            y = y - y.mean(1, keepdim=True)
        if self.kind in OF_OTHERS:
            y = y + OF_OTHERS[self.kind](h if on else x)
        return x + y


def train(kind: str, *, by_attribute: bool = False, **layout: bool | str) -> str:
    """Trains four steps, switched on in the second, and in the third by one sample alone. Returns the error, if there
    is one, else "" if all weights are those of one process."""
    model, reference = made(lambda: Block(kind)), made(lambda: Block(kind))
    engine = Engine(model, ParallelConfig(tp=2, blocks="layers", **layout), optimizer=SGD)  # type: ignore[arg-type]
    optimizer = SGD(list(reference.parameters()))
    x = torch.randn(SAMPLES, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        for on in ([0, 0, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0]):
            batch = {"x": x, "switched_on": torch.tensor(on) * (not by_attribute)}
            for one in (*model.layers, *reference.layers):
                one.on = by_attribute and any(on)  # type: ignore[assignment]
                one.limit = 0.5 if one.on else 1e9  # type: ignore[assignment]
            engine.run([batch], loss_of)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            loss_of(reference, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        state = engine.state_dict()["model"]
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14, msg=name)
    except Exception as error:
        return str(error)
    finally:
        engine.close()
    return ""


SGD = functools.partial(torch.optim.SGD, lr=0.1)

WHOLE: dict[str, Any] = {"sequence_parallel": False}

CASES: dict[str, tuple[Callable[[], str], str]] = {
    "mean": (lambda: train("mean"), "aten::mean, aten::sub"),
    "mean, by an attribute": (lambda: train("mean", by_attribute=True), "aten::mean, aten::sub"),
    "mean, halves": (lambda: train("mean", tp_overlap="sub"), "aten::mean, aten::sub"),
    "limit": (lambda: train("limit", by_attribute=True), "each rank decides by something else (aten::gt of [2, 6, 1])"),
    "limit in place": (lambda: train("limit in place"), "each rank decides by something else (aten::gt of [2, 6, 1])"),
    "limit of whole numbers": (lambda: train("limit of whole numbers"), "decides by something else (aten::_to_copy"),
    "limit of indices": (lambda: train("limit of indices"), "each rank decides by something else (aten::min of"),
    "limit of a count": (lambda: train("limit of a count"), "cannot be divided"),
    "limit over tokens": (lambda: train("limit over tokens", by_attribute=True), ""),
    "parts of other widths": (lambda: train("parts of other widths"), ""),
    "any of many": (lambda: train("any of many"), "each rank decides by something else (aten::any of [2, 6, 16])"),
    "many of them": (lambda: train("many of them"), "each rank decides by something else (aten::mean of [2, 6, 16])"),
    "behind a mask": (lambda: train("behind a mask"), "each rank decides by something else (aten::gt of [2, 6, 1])"),
    "of what is masked": (lambda: train("of what is masked", **WHOLE), ""),
    "experts": (lambda: train("experts", tp_overlap="none"), "decides what to compute by a value"),
    "limit of all": (lambda: train("limit of all", by_attribute=True), ""),
    "root": (lambda: train("root"), ""),
    "root, by an attribute": (lambda: train("root", by_attribute=True), ""),
    "root, halves": (lambda: train("root", tp_overlap="sub"), ""),
    "the same function of other dimensions": (lambda: train("dim"), "aten::softmax"),
    "over tokens": (lambda: train("tokens", sequence_parallel=False), ""),
    "over tokens that ranks share": (lambda: train("tokens", sequence_parallel=True), "aten::mean, aten::sub"),
    "mean of others": (lambda: train("mean of others", **WHOLE), "layers.0 (Block) computes otherwise"),
    "mean of others, by an attribute": (
        lambda: train("mean of others", by_attribute=True, **WHOLE),
        "mean of other tensors",
    ),
    "mean of others, halves": (
        lambda: train("mean of others", tp_overlap="sub", **WHOLE),
        "it runs aten::mean",
    ),
    "norm of others": (lambda: train("norm of others", **WHOLE), "norm of other tensors"),
    "cumsum of others": (lambda: train("cumsum of others", **WHOLE), "aten::cumsum of other tensors"),
    "topk of others": (lambda: train("topk of others", tp_overlap="none", **WHOLE), "aten::topk of other tensors"),
    "either": (lambda: train("either"), ""),
    "either, by an attribute": (lambda: train("either", by_attribute=True, tp_overlap="none"), ""),
    "buffer": (lambda: train("buffer"), "Of its tensors 'seen' a rank has all 32 entries"),
}


def of_cases(names: list[str]) -> list[str]:
    return [CASES[name][0]() for name in names]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    "names",
    [
        ["mean, by an attribute", "root", "over tokens that ranks share", "buffer"],
        ["mean", "mean, halves", "root, by an attribute", "root, halves"],
        ["mean of others", "mean of others, by an attribute", "mean of others, halves", "norm of others"],
        ["the same function of other dimensions", "over tokens", "limit", "limit of all"],
        ["limit in place", "limit of whole numbers", "limit of indices", "limit of a count", "limit over tokens"],
        ["parts of other widths", "experts", "any of many", "many of them", "behind a mask", "of what is masked"],
        ["cumsum of others", "topk of others", "either", "either, by an attribute"],
    ],
    ids="; ".join,
)
def test_takes_another_way_later(ranks: RankPool, names: list[str]) -> None:
    for found in ranks.run(of_cases, 2, names):
        for name, error in zip(names, found, strict=True):
            expected = CASES[name][1]
            assert expected in error and bool(error) == bool(expected), f"{name}: {error}"


def noted(code: Callable[[], object], known: NumberSet | None = None) -> Operators:
    """Returns what `code` runs of torch."""
    found: Operators = {}
    with OperatorWatch(nn.Module(), known or NumberSet(), found.update).around():
        code()
    return found


def names_of(found: Iterable[str]) -> list[str]:
    """Returns the names of operators, each once: an operator is noted in a sequence, and for itself."""
    return list(dict.fromkeys(found))


def test_sequences_are_those_of_the_code() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    once = noted(lambda: x.relu().sqrt().exp())
    assert names_of(once.values()) == ["aten::relu", "aten::sqrt", "aten::exp"]
    assert once == noted(lambda: x.relu().sqrt().exp())
    assert once.keys() != noted(lambda: x.sqrt().relu().exp()).keys()
    assert noted(lambda: x.sum(0)).keys() != noted(lambda: x.sum(1)).keys()
    known = NumberSet()
    for sequence in once:
        known.add(sequence)
    assert names_of(noted(lambda: x.relu().sqrt().exp().neg(), known).values()) == ["aten::neg"]

    def loops(times: int) -> Tensor:
        y = x
        for _ in range(times):
            y = (y * 2).relu()
        return y

    assert noted(lambda: loops(3)).keys() == noted(lambda: loops(9)).keys()


def test_what_counts_and_what_does_not() -> None:
    x = torch.randn(4, 4, requires_grad=True)

    def with_own() -> None:
        y = x.relu()
        with of_fold3d():
            y = y.sum(0)
        y.sqrt()

    assert noted(with_own) == noted(lambda: x.relu().sqrt())
    weight = torch.randn(4, 4)
    assert noted(lambda: x @ weight).keys() == noted(lambda: nn.functional.linear(x, weight)).keys()

    def in_another_way() -> None:
        with of_fold3d():
            y = (x.double() @ weight.double()).float()
        note_product(y, [x, weight])

    assert noted(lambda: x @ weight).keys() == noted(in_another_way).keys()
    assert not noted(lambda: nn.functional.dropout(x, 0.5))
    run = OperatorRun(NumberSet())
    assert swap_operator_run(run) is None
    x.relu()
    assert swap_operator_run(None) is run
    x.exp()
    assert names_of(name for _, name in run.unknown) == ["aten::relu"]


def test_what_raises_is_over() -> None:
    x = torch.randn(4, 4)
    run = OperatorRun(NumberSet())
    swap_operator_run(run)
    with pytest.raises(RuntimeError):
        torch.add(x, torch.randn(3))
    x.relu()
    swap_operator_run(None)
    assert names_of(name for _, name in run.unknown) == ["aten::add", "aten::relu"]
