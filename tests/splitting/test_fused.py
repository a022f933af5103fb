"""Which products next to a region's borders are fused, and that blocks compute the same with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fold3d.splitting import plan_sharding
from fold3d.splitting.emulate import EmulatedGroup, EmulatedOps
from fold3d.tensor_parallel.block_call import BlockCall
from fold3d.tensor_parallel.region import COPY, REDUCE, Exchange
from fold3d.trace.capture import trace_call
from tests.splitting.models import build
from tests.splitting.shared import compare


class Apart(EmulatedOps):
    """Counts what a rank fuses, and does one after the other."""

    def __init__(self, ops: EmulatedOps, calls: Counter[str]) -> None:
        super().__init__(ops._group, ops.rank)
        self.fused = self
        self._calls = calls

    def copy_matmul(self, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        self._calls[f"copy {len(weights)}"] += 1
        copied = self.exchange(x, COPY)
        return [copied @ weight for weight in weights]

    def all_gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], dim: int, length: int
    ) -> tuple[Tensor, list[Tensor]]:
        self._calls[f"gather {len(weights)}"] += 1
        whole = self.exchange(x, Exchange.gather(dim, length, sums=True))
        return whole, [whole @ weight for weight in weights]

    def matmul_all_reduce(self, x: Tensor, weight: Tensor) -> Tensor:
        self._calls["reduce"] += 1
        return self.exchange(x @ weight, REDUCE)

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        self._calls["scatter"] += 1
        return self.exchange(x @ weight, Exchange.reduce_scatter(dim, x.shape[dim]))


FUSED = {"gpt2": ["1", "1"], "llama": ["3", "2"], "opt": ["3", "1"], "bloom": ["1", "1"], "gptj": ["4"]}
"""Products of the tensors that enter a block's regions, a block's two; GPT-J's attention and perceptron take the same
one."""


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("family", FUSED)
def test_blocks_compute_the_same(family: str, sequence: bool) -> None:
    tiny = build(family)
    plan = plan_sharding(tiny.model, tiny.trace(), tiny.batch, 2, sequence_parallel=sequence)
    calls: Counter[str] = Counter()
    assert compare(tiny.model, tiny.batch, plan, lambda ops: Apart(ops, calls)) < 1e-10
    names = ("gather", "scatter") if sequence else ("copy", "reduce")
    blocks = 2 * len(plan.blocks)
    expected = Counter({f"{names[0]} {number}": blocks * FUSED[family].count(number) for number in FUSED[family]})
    exits = sum(len(group.exits) for group in next(iter(plan.blocks.values())).groups)
    assert calls == expected + Counter({names[1]: blocks * exits})


class Block(nn.Module):
    """Linear layers that take the same tensor, or a copy of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        gate = self.gate(y)
        if self.way == "copied":
            y = y.clone()
        return x + self.down(gate * self.up(y))


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(way) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x = layer(x)
        return (x,)


@pytest.mark.parametrize(("way", "copies"), [("same", {"copy 2": 2}), ("copied", {"copy 1": 4})])
def test_a_tensor_is_told_from_its_copy(way: str, copies: dict[str, int]) -> None:
    """In the second block: what enters the first has no gradient to be summed."""
    torch.manual_seed(0)
    model, batch = Net(way).double(), {"x": torch.randn(2, 5, 8, dtype=torch.float64)}
    plan = plan_sharding(model, trace_call(model, ["layers.0", "layers.1"], batch), batch, 2)
    calls: Counter[str] = Counter()
    assert compare(model, batch, plan, lambda ops: Apart(ops, calls)) < 1e-10
    assert calls == Counter(copies) + Counter({"reduce": 4})


def test_what_is_written_to_is_multiplied_again() -> None:
    call, x = BlockCall(EmulatedOps(EmulatedGroup(2), 0)), torch.randn(3, 4)
    products = {name: torch.randn(3, 5) for name in ("up", "gate", "other")}
    call.add_products(x, products)
    assert call.product(x.clone(), "up") is None and call.product(x, "down") is None
    assert call.product(x, "up") is products["up"] and call.product(x, "up") is None
    with torch.no_grad():
        assert call.product(x, "gate") is None, "made with a gradient"
    x.mul_(2)
    assert call.product(x, "other") is None
