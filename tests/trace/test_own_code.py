"""What the model's own code, between its modules, computes: what it reads travels as far as somebody reads what comes
of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.trace import Trace, trace
from fold3d.trace.arguments import Arguments
from tests.trace.chains import assert_equal, chained, cuts, ranks_of, whole

Reading = Callable[["_Reads", Tensor], Any]


class _Reads(nn.Module):
    """Its own code reads, behind the third block, what the first one returned."""

    total: Tensor

    def __init__(self, read: Reading) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.pool = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.kept: Tensor | None = None
        self.read = read

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        read = self.read(self, first)
        x = self.blocks[3](x if read is None else x + read[0])
        return {"loss": x.square().sum(), "read": read}


def _computes(model: _Reads, first: Tensor) -> None:
    (first * 2).sum(0)


def _computes_for_nobody(model: _Reads, first: Tensor) -> None:
    model.pool(first.tanh() + first)


def _fills(model: _Reads, first: Tensor) -> None:
    memory = torch.zeros(2, 8, dtype=first.dtype)
    memory[:, 4:] = first.detach()
    memory.mul_(2.0)


def _keeps(model: _Reads, first: Tensor) -> None:
    model.kept = first.detach().mean() + 1


def _counts(model: _Reads, first: Tensor) -> None:
    model.total += first.detach().sum(0)


def _replaces(model: _Reads, first: Tensor) -> None:
    model.total = 0.5 * model.total + first.detach().sum(0)


def _checks(model: _Reads, first: Tensor) -> None:
    torch._assert_async(first.detach().isfinite().all())


def _adds(model: _Reads, first: Tensor) -> tuple[Tensor]:
    return (first.tanh(),)


def _adds_what_it_has_filled(model: _Reads, first: Tensor) -> tuple[Tensor]:
    memory = torch.zeros(2, 4, dtype=first.dtype)
    memory[:, :2] = first[:, :2]
    return (memory,)


def _recorded(read: Reading, *, only_loss: bool = True) -> tuple[_Reads, dict[str, Tensor], Trace]:
    torch.manual_seed(0)
    model, batch = _Reads(read).double(), {"x": torch.randn(2, 4, dtype=torch.double)}
    return model, batch, trace(model, example=Arguments.of("", batch).reading(only_loss))


def _carries_first(recorded: Trace, border: int) -> bool:
    return "blocks.0" in [value.module for one in recorded.crossings[border] for value in one.values]


@pytest.mark.parametrize("read", [_computes, _computes_for_nobody, _fills])
def test_what_is_computed_for_nobody_needs_nothing(read: Reading) -> None:
    model, batch, recorded = _recorded(read)
    assert not _carries_first(recorded, 2)
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch, only_loss=True), whole(model, batch))


@pytest.mark.parametrize("read", [_keeps, _counts, _replaces, _checks])
def test_what_leaves_a_trace_is_read(read: Reading) -> None:
    """In an attribute, a buffer, or an error that it might raise."""
    _, _, recorded = _recorded(read)
    assert _carries_first(recorded, 2)
    assert _carries_first(recorded, 3)


@pytest.mark.parametrize("read", [_adds, _adds_what_it_has_filled])
def test_what_a_block_reads_of_it_travels(read: Reading) -> None:
    model, batch, recorded = _recorded(read)
    assert _carries_first(recorded, 3)
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, len(ranges))
        assert_equal(chained(ranks, recorded, len(ranges), batch, only_loss=True), whole(model, batch))


def test_a_result_beside_the_loss_is_read_by_who_may_read_it() -> None:
    def returned(model: _Reads, first: Tensor) -> list[Tensor]:
        return [torch.zeros(4, dtype=first.dtype), first.tanh()]

    assert not _carries_first(_recorded(returned)[2], 2)
    assert _carries_first(_recorded(returned, only_loss=False)[2], 3)
