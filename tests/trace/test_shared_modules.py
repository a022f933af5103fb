"""Modules that run by themselves and inside of others: their masks must not depend on the layout either."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fold3d.trace import trace
from tests.trace.chains import chained, ranks_of


class _Block(nn.Module):
    def __init__(self, drop: nn.Module | None, checkpoints: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = drop
        self.checkpoints = checkpoints

    def forward(self, x: Tensor, drop: nn.Module | None = None) -> Tensor:
        drop = drop or self.drop
        assert drop is not None
        if self.checkpoints:
            return x + checkpoint(lambda x: drop(torch.tanh(self.linear(x))), x, use_reentrant=False)
        return x + drop(torch.tanh(self.linear(x)))


class _Embedding(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.drop = drop

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop(self.table(ids))


class _Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.embed = _Embedding(self.drop) if kind == "in the embedding" else nn.Embedding(16, 8)
        self.hands_over = kind == "handed to blocks"
        shared = self.drop if kind.startswith("of blocks") else nn.Dropout(0.5)
        self.blocks = nn.ModuleList(
            _Block(None if self.hands_over else shared, kind.endswith("checkpoints")) for _ in range(4)
        )
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(x, self.drop) if self.hands_over else block(x)
        return {"loss": self.head(x).logsumexp(-1).square().mean()}


@pytest.mark.parametrize("kind", ["of blocks", "of blocks with checkpoints", "handed to blocks", "in the embedding"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_masks_do_not_depend_on_the_layout(kind, recompute) -> None:
    torch.set_default_dtype(torch.float64)
    model = _Model(kind)
    batch = {"ids": torch.randint(0, 16, (2, 5))}
    recording = trace(model, example=batch)
    plain = _Model(kind.removesuffix(" with checkpoints"))
    plain.load_state_dict(model.state_dict())
    want = chained(ranks_of(plain, recording, [(0, 4)], 1), recording, 1, batch, key=(3, 5, 7))
    for ranges in ([(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]):
        ranks = ranks_of(model, recording, ranges, len(ranges), recompute=recompute)
        got = chained(ranks, recording, len(ranges), batch, key=(3, 5, 7))
        assert float(got[0]) == pytest.approx(float(want[0]), abs=1e-12)
        assert all(torch.allclose(got[1][name], want[1][name], atol=1e-12) for name in want[1])


class _Runner(nn.Module):
    """Calls blocks that it does not own."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, blocks: list[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return self.drop(x)


class _Delegating(nn.Module):
    """Its blocks are called by another module: all of them in one call, or each in a call of its own."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(_Block(nn.Dropout(0.5)) for _ in range(4))
        self.runner = _Runner(nn.Identity() if at_once else self.drop)
        self.head = nn.Linear(8, 16)
        self.at_once = at_once

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.embed(ids))
        for blocks in [list(self.blocks)] if self.at_once else [[block] for block in self.blocks]:
            x = self.runner(blocks, x)
        return {"loss": self.head(x).logsumexp(-1).square().mean()}


@pytest.mark.parametrize("at_once", [True, False])
def test_blocks_that_another_module_calls_draw_the_same_in_every_layout(at_once) -> None:
    torch.set_default_dtype(torch.float64)
    model, batch = _Delegating(at_once), {"ids": torch.randint(0, 16, (2, 5))}
    recording = trace(model, example=batch)
    want = chained(ranks_of(model, recording, [(0, 4)], 1), recording, 1, batch, key=(3, 5, 7))
    for ranges in ([(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]):
        got = chained(ranks_of(model, recording, ranges, len(ranges)), recording, len(ranges), batch, key=(3, 5, 7))
        assert float(got[0]) == pytest.approx(float(want[0]), abs=1e-12)
        assert all(torch.allclose(got[1][name], want[1][name], atol=1e-12) for name in want[1])


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "in checkpoints"])
def test_a_module_that_fails_inside_is_left(checkpoints) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not today")

    class Catching(_Model):
        def __init__(self, checkpoints: bool) -> None:
            super().__init__("plain")
            self.failing = Failing()
            self.checkpoints = checkpoints

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                try:
                    x = self.failing(x)
                except ValueError:
                    x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            return {"loss": self.head(x).logsumexp(-1).square().mean()}

    torch.set_default_dtype(torch.float64)
    model = Catching(checkpoints)
    plain = Catching(False)
    plain.load_state_dict(model.state_dict())
    batch = {"ids": torch.randint(0, 16, (2, 5))}
    recording = trace(model, example=batch)
    want = chained(ranks_of(plain, recording, [(0, 4)], 1), recording, 1, batch, key=(3, 5, 7))
    ranges = [(0, 2), (2, 4)]
    got = chained(ranks_of(model, recording, ranges, 2), recording, 2, batch, key=(3, 5, 7))
    assert float(got[0]) == pytest.approx(float(want[0]), abs=1e-12)
    assert all(torch.allclose(got[1][name], want[1][name], atol=1e-12) for name in want[1])
