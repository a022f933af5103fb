"""Models that save the generator's state: it must be right between any two modules, skipped ones included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fold3d.trace import trace
from tests.trace.chains import chained, ranks_of


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _Model(nn.Module):
    def __init__(self, middle: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(6))
        self.head = nn.Linear(8, 16)
        self.middle = middle

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.middle(self.blocks, self.embed(ids))
        return {"loss": self.head(x).logsumexp(-1).square().mean()}


def _checkpoint_behind_plain_blocks(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks[:3]:
        x = block(x)
    x = checkpoint(lambda x: F.dropout(blocks[3](x), 0.5), x, use_reentrant=False)
    for block in blocks[4:]:
        x = block(torch.tanh(x))
    return x


def _one_mask_for_several_places(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    for i, block in enumerate(blocks):
        if i == 1:
            state = torch.get_rng_state()
        x = block(x)
        if i == 4:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                x = F.dropout(x, 0.5)
    return x


@pytest.mark.parametrize("middle", [_checkpoint_behind_plain_blocks, _one_mask_for_several_places])
@pytest.mark.parametrize("ranges", [[(0, 4), (4, 6)], [(0, 2), (2, 4), (4, 6)]], ids=["two", "three"])
def test_masks_do_not_depend_on_the_layout(middle, ranges) -> None:
    torch.set_default_dtype(torch.float64)
    model = _Model(middle)
    batch = {"ids": torch.randint(0, 16, (2, 5))}
    recording = trace(model, example=batch)
    want = chained(ranks_of(model, recording, [(0, 6)], 1), recording, 1, batch, key=(3, 5, 7))
    count = len(ranges)
    got = chained(ranks_of(model, recording, ranges, count), recording, count, batch, key=(3, 5, 7))
    assert float(got[0]) == pytest.approx(float(want[0]), abs=1e-12)
    assert all(torch.allclose(got[1][name], want[1][name], atol=1e-12) for name in want[1])
