"""Blocks that look alike and are not; what a block does in training only; weights that are read in several ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fold3d.engine.loss import token_share
from fold3d.errors import ConfigError, TraceError
from fold3d.sharding.plan import ShardingPlan
from fold3d.splitting import plan_sharding
from fold3d.splitting.block_classes import BlockClasses, _computed
from fold3d.splitting.capture import capture
from fold3d.splitting.overrides import Overrides
from fold3d.splitting.prove_again import prove_again
from fold3d.trace import Trace
from fold3d.trace import shadow as shadow_module
from fold3d.trace.arguments import by_name
from fold3d.trace.capture import trace_call
from tests.splitting.models import build
from tests.splitting.shared import compare

WIDTH = 16


class Attention(nn.Module):
    def __init__(self, heads: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * self.scale
        hidden = torch.full((), torch.finfo(scores.dtype).min)  # of the default type
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = torch.where(future, hidden, scores).softmax(-1) @ v
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return x + out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def inner(self, y: Tensor) -> Tensor:
        return torch.tanh(y)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.inner(self.up(x)))
        return out


class Counting(Mlp):
    """Each neuron's activity is written down in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("active", torch.zeros(2 * WIDTH))

    def inner(self, y: Tensor) -> Tensor:
        if self.training:
            self.active += y.detach().abs().mean((0, 1))
        return torch.tanh(y)


class Levelled(Mlp):
    """In training, neurons are scaled by all of them."""

    def inner(self, y: Tensor) -> Tensor:
        return y / (1 + y.abs().mean(-1, keepdim=True)) if self.training else y


class Noisy(Mlp):
    """In training, something is drawn and dropped."""

    def inner(self, y: Tensor) -> Tensor:
        return F.dropout(y + torch.randn_like(y), 0.1, self.training) if self.training else y


class Normed(Mlp):
    """Results depend on all samples in training, in the same way on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.mT).mT)


class Transposed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(torch.tanh(self.up(x)), self.up.weight.mT)


class Tied(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return out


class Failing(Mlp):
    """Wants more than the probes give it: values of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and not torch.is_grad_enabled():
            raise LookupError("no such thing")
        return super().forward(x)


def stacked(*blocks: nn.Module) -> tuple[nn.Module, dict[str, Tensor], Trace]:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(blocks)

        def forward(self, x: Tensor) -> tuple[Tensor]:
            for layer in self.layers:
                x = layer(x)
            return (x,)

    torch.manual_seed(0)
    model, batch = Stacked().double(), {"x": torch.randn(2, 5, WIDTH).double()}
    return model, batch, trace_call(model, [f"layers.{k}" for k in range(len(blocks))], batch)


def plan(*blocks: nn.Module, sequence_parallel: bool = False) -> tuple[nn.Module, dict[str, Tensor], ShardingPlan]:
    model, batch, traced = stacked(*blocks)
    return model, batch, plan_sharding(model, traced, batch, 2, sequence_parallel=sequence_parallel)


def test_blocks_with_other_numbers_of_heads_are_divided_each_in_its_way() -> None:
    model, batch, found = plan(Attention(4), Attention(2), Attention(4))
    assert compare(model, batch, found) < 1e-10
    numbers = [{one.whole: one.part for one in split.attributes} for split in found.blocks.values()]
    assert numbers == [{4: 2}, {2: 1}, {4: 2}]


def test_blocks_are_of_one_class_where_their_numbers_mean_nothing() -> None:
    class Numbered(Attention):
        def __init__(self, number: int, scale: float) -> None:
            super().__init__(scale=scale)
            self.number = number

    model, batch, traced = stacked(Numbered(0, 1.0), Numbered(1, 1.0), Numbered(2, 0.5), Numbered(3, 1.0))
    classes = BlockClasses(Overrides({}))
    first, second, third, fourth = (classes.of(name, call) for name, call in capture(model, traced, batch).items())
    assert first == second == fourth != third


def test_numbers_with_a_default_mean_something() -> None:
    class Deep(Mlp):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.depth = depth

        def inner(self, y: Tensor) -> Tensor:
            return torch.tanh(y / (1 + getattr(self, "depth", 0)))

    model, batch, traced = stacked(Deep(0), Deep(1), Deep(0))
    classes = BlockClasses(Overrides({}))
    first, second, third = (classes.of(name, call) for name, call in capture(model, traced, batch).items())
    assert first == third != second


def test_blocks_whose_numbers_nothing_reads_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [Mlp() for _ in range(6)]
    for number, block in enumerate(blocks):
        vars(block)["number"] = number
    model, batch, traced = stacked(*blocks)
    calls = capture(model, traced, batch)
    ran: list[nn.Module] = []
    monkeypatch.setattr(
        "fold3d.splitting.block_classes._computed", lambda call, run=_computed: (ran.append(call.block), run(call))[1]
    )
    classes = BlockClasses(Overrides({}))
    assert len({classes.of(name, call) for name, call in calls.items()}) == 1
    assert not {id(call.block) for call in list(calls.values())[1:]} & set(map(id, ran))


@pytest.mark.parametrize("block", [Counting, Levelled])
def test_what_only_training_shows_is_not_divided(block: type[nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.up \(32, 16\) cannot be divided: divided, .*rank"):
        plan(block(), block())


@pytest.mark.parametrize("block", [Noisy, Normed])
def test_what_is_drawn_or_alike_on_all_ranks_in_training_is_divided(block: type[nn.Module]) -> None:
    model, batch, found = plan(block(), block())
    assert found.shard_of("layers.1.up.weight") is not None
    assert compare(model.eval(), batch, found) < 1e-10


def test_norms_over_the_batch_do_not_share_the_sequence() -> None:
    assert plan(Mlp(), Mlp(), sequence_parallel=True)[2].sequence
    found = plan(Normed(), Normed(), sequence_parallel=True)[2]
    assert not found.sequence
    assert found.blocks["layers.0"].groups


@pytest.mark.parametrize(
    "block, error, says",
    [
        (Tied, ConfigError, r"layers\.0\.up \(32, 16\) cannot be divided: another module holds its weight, too"),
        (Transposed, ConfigError, r"layers\.0\.up \(32, 16\) cannot be divided: it is multiplied in two ways"),
        (Failing, TraceError, r"tp=2: layers\.0 \(Failing\) could not be run by itself .*LookupError: no such thing"),
    ],
)
def test_refusals_say_why(block: Callable[[], nn.Module], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        plan(block(), block())


class Numbered(Mlp):
    """The third of these returns something else, as its number says."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y, y], 1) if self.number == 2 else y


class Lengthening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(number) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_blocks_that_are_made_alike_stand_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A giant has a hundred of them; which shapes they return is found out with one."""
    copied: list[nn.Module] = []

    def fake_copy(module: nn.Module, *others: Any) -> nn.Module:
        copied.append(module)
        return shadow_module.fake_copy(module, *others)

    monkeypatch.setattr("fold3d.trace.shape_only.fake_copy", fake_copy)
    model, batch = Lengthening(), {"x": torch.zeros(2, 8, WIDTH)}
    calls = capture(model, trace_call(model, [f"layers.{k}" for k in range(6)], batch), batch)
    assert [call.args[0].shape[1] for call in calls.values()] == [8, 8, 8, 16, 16, 16]
    assert len(copied) == 3, "the first two, the third and the ones behind it"


def test_proving_a_block_again_reads_no_number_of_the_call() -> None:
    """Whether a model uses `num_items_in_batch` decides how its loss counts: nobody but the model may use it."""
    tiny = build("llama")
    traced = tiny.trace()
    found = plan_sharding(tiny.model, traced, tiny.batch, 2)

    def model(**given: Any) -> Tensor:
        arguments = by_name(tiny.model, "", (), given)
        name = next(iter(found.blocks))
        assert prove_again(tiny.model, traced, found, arguments, {name: ()}) == {name: ""}
        return torch.tensor(3.0)

    share = token_share(torch.tensor(12), replicas=2, micro_batches=4)
    assert float(share(model, dict(tiny.batch))) == 3.0 / 4  # type: ignore[arg-type]
