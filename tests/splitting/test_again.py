"""Again: what nobody has written to is computed once, whatever is written to anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fold3d.sharding.shard import Shard
from fold3d.splitting.capture import CapturedCall
from fold3d.splitting.probe import Local, Poison, Probe
from fold3d.splitting.torch_modes import Again


def test_the_same_call_returns_the_same() -> None:
    again, x, other = Again(), torch.randn(4), torch.randn(4)
    again.know([x])
    with again:
        assert torch.tanh(x * 2) is torch.tanh(x * 2)
        assert x * 2 is not x * 2.0
        assert torch.tanh(other) is not torch.tanh(other)
        assert x + other is not x + other
    assert torch.equal(torch.tanh(x * 2), again.__torch_function__(torch.tanh, (), (x * 2,)))


def test_what_was_written_to_is_computed_anew() -> None:
    again, x = Again(), torch.randn(4)
    again.know([x])
    want, fourfold = x * 2 + 1, x * 4 + 1
    with again:
        for _ in range(3):
            y = x * 2
            y += 1  # belongs to who was given it
            assert torch.equal(y, want)
        view = (x * 3).view(2, 2)
        view[0, 0] = 0.0
        assert torch.equal((x * 3).view(2, 2), (x * 3).reshape(2, 2))
        assert float((x * 3)[0]) == float(x[0] * 3)
        for _ in range(3):
            hidden = x * 4
            hidden.data += 1
            assert torch.equal(hidden, fourfold)
        x.zero_()
        assert not (x * 2).any()


def test_what_may_be_another_is_computed_anew() -> None:
    again, x, y = Again(), nn.Parameter(torch.randn(4)), torch.randn(4)
    again.know([x, y])
    with torch.no_grad(), again:
        before, kept = x * 2, y * 2
        with again.without([x]):
            data, x.data = x.data, torch.zeros(4)
            assert not (x * 2).any()
            assert y * 2 is kept
            x.data = data
        assert torch.equal(x * 2, before)


class _Adding(nn.Module):
    """Writes into what its products return, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(8))
        self.slope = 2.0

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.other(x)
        a += b.tanh() * self.scale
        b.mul_(self.slope)
        return self.last(a) + b[..., :1]


def test_a_probe_shows_the_same_however_often_it_has_run() -> None:
    torch.manual_seed(0)
    block = _Adding()
    args = (torch.randn(2, 3, 8),)
    call = CapturedCall(block, args, {}, frozenset({()}))
    asked = [Poison([k], site=f"{name}.weight") for k in range(8) for name in ("one", "other", "last")]
    asked += [Poison([k], parameter="scale") for k in range(8)]
    probe = Probe(call)
    for _ in range(2):
        for poison in asked:
            assert probe.respond(poison).same(Probe(call).respond(poison))
    assert probe.respond(asked[0]).sinks["last.weight"].tolist() == [True] + [False] * 7
    assert not probe.respond(asked[0]).leaks
    assert probe.respond(asked[1]).leaks


def test_a_probe_computes_anew_what_depends_on_what_is_otherwise() -> None:
    torch.manual_seed(0)
    call = CapturedCall(_Adding(), (torch.randn(2, 3, 8),), {}, frozenset({()}))
    probe = Probe(call)

    def slope(value: float, of: Probe) -> Probe:
        of.block.slope = value  # type: ignore[assignment]
        return of

    every = list(range(4, 8))
    outputs = {f"{name}.weight": torch.tensor(every) for name in ("one", "other")}
    shards = {"scale": Shard.even(0, 8, 2), "last.weight": Shard.even(1, 8, 2)}
    for value in (2.0, 3.0, 2.0):
        for local in (None, Local(outputs, shards, rank=1), None):
            found = slope(value, probe).run_otherwise(local=local)
            expected = slope(value, Probe(call)).run_otherwise(local=local)
            assert found.keys() == expected.keys()
            assert all(map(torch.equal, found["last.weight"], expected["last.weight"]))
        assert all(map(torch.equal, probe.run()["last.weight"], found["last.weight"]))
