"""What HuggingFace users run on several hosts, as systems of the cluster: they train right, and what they must send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.cluster.on_rank import data_rank
from benchmarks.cluster.on_rank.virtual_layer import VirtualLayer
from benchmarks.cluster.results.latency import Latency
from benchmarks.cluster.results.report import Report, Run
from benchmarks.cluster.rivals import WAYS, rival_costs
from benchmarks.cluster.scenarios import SCENARIOS, Scenario
from benchmarks.cluster.systems import FAMILIES, LEARNING_RATE, find_system
from tests.helpers.ranks import RankPool

TINY = replace(SCENARIOS["smoke"], micro_batches=4)
RIVALS = [name for name, family in FAMILIES.items() if family.library == "data"]
WIDTH = 8


class Bent(VirtualLayer):
    """A virtual layer with gradients that depend on data and weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x`."""
        y: Tensor = super().forward(x) + nn.functional.linear(x, self.weight.view(WIDTH, WIDTH))
        return torch.tanh(y)


class BentModel(nn.Module):
    """As many layers as the scenario has, the same on each rank."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        count = scenario.layers * scenario.pp
        self.layers = nn.ModuleList(Bent(WIDTH * WIDTH, 0.0, 0.0) for _ in range(count))
        made = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3, generator=made)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss of micro-batch `x`, scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batches() -> Tensor:
    """Returns the batches of all replicas, (replicas, micro-batches, WIDTH)."""
    return torch.randn(TINY.dp, TINY.micro_batches, WIDTH, generator=torch.Generator().manual_seed(1))


def train_as(name: str) -> tuple[float, list[list[float]]]:
    """Runs two steps of a system on the calling rank; returns the mean loss of the second over all, and the weights."""

    def own_batch(*_: Any) -> Tensor:
        return batches()[dist.get_rank() // TINY.pp]

    with mock.patch.object(data_rank, "VirtualModel", BentModel), mock.patch.object(data_rank, "make_batch", own_batch):
        rank = data_rank.DataRank(TINY, find_system(name, TINY))
    rank.step()
    rank.step()
    loss = rank.loss.clone()
    dist.all_reduce(loss)
    weights = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for parameter in rank.model.parameters()
    ]
    found = [weight.detach().flatten().tolist() for weight in weights]
    rank.close()
    return float(loss) / dist.get_world_size(), found


@pytest.mark.dist
@pytest.mark.parametrize("parts", ["", ":2"])
@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_trains_as_one_process(name: str, parts: str, ranks: RankPool) -> None:
    one = BentModel(TINY)
    optimizer = torch.optim.SGD(one.parameters(), lr=LEARNING_RATE)
    for _ in range(2):
        optimizer.zero_grad()
        losses = []
        for x in batches().flatten(0, 1):
            loss = one(x[None]) / (TINY.dp * TINY.micro_batches)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    for mean_loss, weights in ranks.run(train_as, TINY.ranks, name + parts):
        assert mean_loss == pytest.approx(sum(losses), rel=1e-5)
        for weight, exact in zip(weights, one.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(weight), exact.detach(), rtol=1e-5, atol=1e-7)


def test_what_rivals_must_send() -> None:
    """On A's four hosts a model of 25 MB, in one micro-batch of four; seconds at 12.5 MB/s."""
    one = SCENARIOS["A"]
    costs = {way: rival_costs(one, way) for way in WAYS}
    sent = {way: round(cost.sent_bytes / 1e6, 2) for way, cost in costs.items()}
    assert sent == {"ddp": 37.5, "zero2": 37.5, "zero3": 168.75, "hsdp": 37.5, "hsdp-scatter": 75.0}
    beside = one.backward_s / 4
    assert costs["ddp"].least_s == pytest.approx(one.compute_s - beside + 3.0)
    assert costs["zero2"].least_s == pytest.approx(one.compute_s - one.forward_s / 4 - beside + 3.0)
    assert costs["zero3"].least_s == pytest.approx(9 * 1.5)
    assert costs["hsdp"].least_s == pytest.approx(one.compute_s - one.forward_s / 4 - beside + 3.0)
    assert [costs[way].emulated_s for way in WAYS] == pytest.approx([0, 1.5, 1.5, 1, 4])
    two = one.on_hosts(ranks_per_host=2, slow_host=1)  # two hosts with links of 25 MB/s
    inside = {way: rival_costs(two, way) for way in WAYS}
    assert inside["ddp"].sent_bytes == costs["ddp"].sent_bytes, "a ring passes a host once"
    assert inside["hsdp"].sent_bytes == inside["hsdp-scatter"].sent_bytes == pytest.approx(25e6)
    assert inside["hsdp"].least_s == pytest.approx(one.compute_s - beside + 1.0)


def test_rivals_by_name_and_in_the_report() -> None:
    one = SCENARIOS["A"]
    assert [find_system(name, one).segments for name in ("torch-ddp", "torch-fsdp2:4")] == [32, 4]
    for name, scenario, reason in (
        ("torch-ddp:3", one, "divide"),
        ("torch-ddp@sim", one, "remove @sim"),
        ("torch-hsdp", replace(one, micro_batches=3), "micro-batches"),
        ("torch-hsdp", one.on_hosts(ranks_per_host=4, slow_host=1), "two hosts"),
    ):
        with pytest.raises(ValueError, match=reason):
            find_system(name, scenario)
    report = Report(scenario=one, network="none", shaped=False)
    nothing = Latency(alone_ms=None, beside_dp_ms=None, dp_sync_ms=None)
    for name, step_s in (("fold3d-auto", 2.0), ("torch-fsdp2:4", 6.0), ("torch-fsdp2:8", 6.5), ("torch-bfs:4", 7.0)):
        report.runs[name] = [Run(step_s=step_s, steps_s=(), stolen=0.0, sent_bytes=None, latency=nothing)]
    table = report.table()
    assert "best torch schedule (torch-bfs:4) / fold3d-auto: 3.500" in table
    assert "torch-fsdp2:4: 37.5 MB must be sent; gloo's emulated reduce-scatter sends 18.8 MB more" in table
    assert "without it 4.500 s (2.250 x auto)" in table
    (found,) = report.as_json()["rivals"].items()
    assert found[0] == "torch-fsdp2:4" and found[1]["without_emulation_s"] == pytest.approx(4.5)
