"""What a divided block's operators compute from is part of what they are compared by; what may differ between calls of
one block, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fold3d._C import NumberSet, note_product, same_origin
from fold3d.tensor_parallel.operators import Operators, OperatorWatch, of_fold3d

WIDTH = 8


class Two(nn.Module):
    """Two linear layers, and a list of four that a batch decides among."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mask", torch.ones(WIDTH))


Code = Callable[[Two, Tensor], object]


def noted(code: Code, block: Two | None = None, x: Tensor | None = None) -> Operators:
    """Returns what `code` runs of torch, given a block and its input."""
    block = Two() if block is None else block
    x = torch.randn(3, 4, WIDTH) if x is None else x
    found: Operators = {}
    with OperatorWatch(block, NumberSet(), found.update).around((x,), {}):
        code(block, x)
    return found


def same(one: Code, other: Code) -> bool:
    return noted(one).keys() == noted(other).keys()


def of_whole_or_part(computes: Callable[[Tensor], object], part: bool) -> Code:
    def code(block: Two, x: Tensor) -> None:
        h = block.up(x).relu()
        computes(h if part else x)

    return code


FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "mean": lambda x: x.mean(-1),
    "topk": lambda x: x.topk(2, -1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "cumsum": lambda x: x.cumsum(-1),
    "softmax": lambda x: x.softmax(-1),
    "in place": lambda x: torch.zeros(x.shape).add_(x),
    "in a list": lambda x: torch.cat([x, x], -1),
    "of many": lambda x: torch._foreach_mul([x, x], 2.0),
    "as an index": lambda x: torch.zeros(3, 4, WIDTH)[x > 0],
    "two steps behind": lambda x: x.exp().mean(-1),
    "twelve steps behind": lambda x: [x := x.sin() for _ in range(12)],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_operators_of_other_tensors(name: str) -> None:
    whole, part = (of_whole_or_part(FUNCTIONS[name], part) for part in (False, True))
    assert same(whole, whole)
    assert same(part, part)
    assert not same(whole, part)


def either(first: Callable[[Two, Tensor], Tensor], second: Callable[[Two, Tensor], Tensor], takes: int) -> Code:
    """Code that computes both and goes on with one."""

    def code(block: Two, x: Tensor) -> None:
        made = first(block, x), second(block, x)
        made[takes].mean(-1)

    return code


PAIRS: dict[str, tuple[Callable[[Two, Tensor], Tensor], Callable[[Two, Tensor], Tensor]]] = {
    "of other weights": (
        lambda block, x: block.up(x).view(3, 4, 2, -1).transpose(1, 2),
        lambda block, x: block.gate(x).view(3, 4, 2, -1).transpose(1, 2),
    ),
    "another view": (lambda block, x: block.up(x).relu(), lambda block, x: block.up(x).relu().transpose(1, 2)),
    "another part": (lambda block, x: block.up(x).chunk(2, -1)[0], lambda block, x: block.up(x).chunk(2, -1)[1]),
    "written to": (lambda block, x: block.up(x), lambda block, x: block.up(x).relu_()),
    "a buffer": (lambda block, x: block.mask * 2, lambda block, x: block.up.bias * 2),
    "weights themselves": (lambda block, x: block.up.weight, lambda block, x: block.gate.weight),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_of_two_tensors(name: str) -> None:
    first, second = PAIRS[name]
    assert not same(either(first, second, 0), either(first, second, 1))


def test_one_of_two_arguments() -> None:
    def of(key: str) -> Operators:
        found: Operators = {}
        given = {name: torch.randn(3) for name in "abc"}
        call = {"a": given["a"], "b": (given["b"], [given["c"]])}
        with OperatorWatch(nn.Module(), NumberSet(), found.update).around((), call):
            given[key].exp()
        return found

    assert len({frozenset(of(key)) for key in "abc"}) == 3
    assert of("a") == of("a")


def test_an_error_says_which_it_was() -> None:
    known = NumberSet()
    for number in noted(of_whole_or_part(FUNCTIONS["mean"], part=False)):
        known.add(number)
    found: Operators = {}
    block, x = Two(), torch.randn(3, 4, WIDTH)
    with OperatorWatch(block, known, found.update).around((x,), {}):
        of_whole_or_part(FUNCTIONS["mean"], part=True)(block, x)
    assert list(found.values()) == ["aten::mean of other tensors"]


def casts(block: Two, x: Tensor) -> None:
    y = x.to(torch.float32).contiguous()
    (F.layer_norm(y, (WIDTH,)) + x).type_as(x).mean(-1)


def drops(p: float) -> Code:
    def code(block: Two, x: Tensor) -> None:
        h = block.up(x)
        (F.dropout(h, p, training=p > 0) + h).mean(-1)

    return code


def test_casts_and_copies_may_come_and_go() -> None:
    x = torch.randn(3, 4, WIDTH)
    expected = noted(casts, x=x).keys()
    for other in (x.double(), x.bfloat16(), x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert noted(casts, x=other).keys() == expected
    assert same(drops(0.0), drops(0.5))


def test_grad_mode_and_autocast_change_nothing() -> None:
    def code(block: Two, x: Tensor) -> None:
        for _ in range(2):  # autocast keeps casts of weights
            x = block.up(x).relu() @ block.gate.weight
        x.mean(-1)

    expected = noted(code).keys()
    with torch.no_grad():
        assert noted(code).keys() == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert noted(code).keys() == expected


def test_a_tensor_that_is_gone_is_no_other_one() -> None:
    """`data` and the like make tensors without an operator, perhaps where one was that is gone."""
    kept: list[Tensor] = []

    def code(block: Two, x: Tensor, *, keeps: bool) -> None:
        for _ in range(50):
            made = block.up(x).relu()
            if keeps:
                kept.append(made)
            del made
            x.data.exp()

    expected = noted(lambda block, x: code(block, x, keeps=True))
    assert noted(lambda block, x: code(block, x, keeps=False)) == expected


def test_weights_may_get_other_memory_and_be_other_objects() -> None:
    block = Two()
    x = torch.randn(3, 4, WIDTH)
    found: list[Operators] = []
    watch = OperatorWatch(block, NumberSet(), lambda one: found.append(dict(one)))

    def run() -> None:
        with watch.around((x,), {}):
            (block.up(x) * block.mask).sum() + block.gate.bias.sum()

    run()
    block.up.weight.data = torch.randn(WIDTH, WIDTH)
    run()
    with torch.no_grad():
        block.up.weight.set_(torch.randn(WIDTH, WIDTH))  # type: ignore[call-overload]
    run()
    block.up.weight, block.mask = nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.zeros(WIDTH)
    run()
    assert found == [found[0]] * 4


def experts(chosen: list[int]) -> Code:
    """As mixtures of experts do: those that some token chose run, and their results are added up."""

    def code(block: Two, x: Tensor) -> None:
        tokens = x.flatten(0, 1)
        out = torch.zeros_like(tokens)
        hit = torch.tensor([[one] for one in chosen])
        for one in hit:
            rows = torch.where(torch.ones(len(tokens)) > 0)[0]
            out.index_add_(0, rows, block.experts[int(one)](tokens[rows]).relu())
        (out + tokens).mean(-1)

    return code


def test_how_many_experts_run_and_which_changes_nothing() -> None:
    expected = noted(experts([0, 1, 2, 3])).keys()
    assert noted(experts([3, 1, 0, 2])).keys() == expected
    assert noted(experts([3, 1, 0, 2] * 4)).keys() == expected


def test_how_long_a_loop_is_changes_nothing() -> None:
    def over_tokens(block: Two, x: Tensor) -> None:
        state, outputs = torch.zeros(3, WIDTH), []
        for token in x.unbind(1):
            state = torch.tanh(block.up(token) + state)
            outputs.append(state)
        torch.stack(outputs, 1).mean(-1)

    expected = noted(over_tokens, x=torch.randn(3, 5, WIDTH)).keys()
    assert noted(over_tokens, x=torch.randn(3, 9, WIDTH)).keys() == expected
    assert noted(over_tokens, x=torch.randn(3, 40, WIDTH)).keys() == expected


def test_a_mask_of_attention_may_come_and_go() -> None:
    def attends(mask: Tensor | None) -> Code:
        def code(block: Two, x: Tensor) -> None:
            q, k, v = (one(x).unsqueeze(1) for one in (block.up, block.gate, block.up))
            F.scaled_dot_product_attention(q, k, v, mask).mean(-1)

        return code

    assert same(attends(None), attends(torch.ones(4, 4, dtype=torch.bool)))


def test_what_fold3d_runs_stands_for_what_it_was_given() -> None:
    def by_others(block: Two, x: Tensor) -> Any:
        h = block.up(x)
        with of_fold3d():
            h = (h.clone() * 2).flatten(0, 1).view(3, 4, WIDTH)
        return h.mean(-1)

    assert same(by_others, lambda block, x: block.up(x).mean(-1))

    def by_nobody(block: Two, x: Tensor) -> Any:  # as what comes from other ranks
        h = block.up(x)
        arrived = h.data
        same_origin(arrived, h)
        return arrived.mean(-1)

    assert same(by_nobody, lambda block, x: block.up(x).mean(-1))

    def in_other_ways(block: Two, x: Tensor) -> Any:
        with of_fold3d():
            h = (x.double() @ block.up.weight.double().T).float() + block.up.bias
        note_product(h, [x, block.up.weight, block.up.bias])
        return h.mean(-1)

    assert same(in_other_ways, lambda block, x: block.up(x).mean(-1))
    assert not same(in_other_ways, lambda block, x: block.gate(x).mean(-1))


def test_what_raises_makes_nothing() -> None:
    def code(block: Two, x: Tensor) -> None:
        h = block.up(x)
        with pytest.raises(RuntimeError):
            torch.add(h, torch.randn(3))
        h.mean(-1)

    mean = [number for number, name in noted(code).items() if name == "aten::mean"]
    assert set(mean) & noted(lambda block, x: block.up(x).mean(-1)).keys(), "its tensor comes from the product"
