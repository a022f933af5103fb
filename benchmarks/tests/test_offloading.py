"""The benchmarks of what leaves the device: that they count right; what they measure is on the pages."""

from __future__ import annotations

import gc
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cluster.comparison import Effort
from benchmarks.cluster.offloading import OffloadReport, measure_offloading, variants
from benchmarks.cluster.on_rank.virtual_layer import VirtualLayer, VirtualModel, make_batch
from benchmarks.cluster.prediction import Costs, predict_step
from benchmarks.cluster.results.report import Run
from benchmarks.cluster.scenarios import PCIE4, SCENARIOS, Scenario
from benchmarks.cluster.session import Session
from benchmarks.cluster.systems import System
from benchmarks.offload import SHORTEST_S, Found, Link, check_losses, slowdown
from benchmarks.tests.test_cluster import CLUSTER, NO_MESSAGES, ROOT
from fold3d.plan.costs import NetworkCosts
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory import Spared
from fold3d.plan.search import search
from fold3d.plan.strategy import Constraints
from fold3d.profile.layers import assumed_profile
from fold3d.trace import trace

COSTS = Costs(latency_s=1e-4, action_s=1e-4)


def test_the_scenario_has_the_ratio_it_is_for() -> None:
    one = SCENARIOS["O"]
    assert one.copies_per_forward == pytest.approx(PCIE4.per_forward) == pytest.approx(0.70, abs=0.005)
    assert one.thinned(2).copies_per_forward == pytest.approx(one.copies_per_forward)
    assert one.with_copy_rate(0.5).copies_per_forward == pytest.approx(2 * one.copies_per_forward)
    assert SCENARIOS["A"].copies_per_forward == 0


def test_a_virtual_layer_saves_what_it_is_told_and_reads_it_again() -> None:
    layer, saved = VirtualLayer(8, 1e-4, 1e-4, 100), []

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    x = torch.ones(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda n: saved[n] * (3 if saved[n].numel() == 100 else 1)):
        y = layer(x)
    y.sum().backward()
    assert sorted(one.numel() for one in saved) == [8, 100]
    assert x.grad is not None and x.grad.tolist() == [3.0] * 4  # what came back is what the backward used


def test_copies_slow_a_step_down_when_they_take_longer_than_a_forward() -> None:
    seconds = {one.name: predict_step(one.scenario, one.system, COSTS) for one in variants(SCENARIOS["O"])}
    kept = seconds["fold3d-aiao-early:4"]
    assert kept <= seconds["fold3d-aiao-activations:4 at 1"] < 1.01 * kept
    assert seconds["fold3d-aiao-activations:4 at 0.5"] > 1.05 * kept
    again = seconds["fold3d-aiao-blocks:4"]
    assert again > 1.2 * kept
    assert seconds["fold3d-aiao-boundaries:4 at 0.5"] == pytest.approx(again, rel=0.01)


def test_beside_slow_copies_a_mixture_is_planned() -> None:
    """No more leaves than must, so that copies hide also where those of everything would not."""
    one = SCENARIOS["O"]
    model, example = VirtualModel(one), {"x": make_batch(one, torch.device("cpu"))[:1]}
    recorded = trace(model, example=example, blocks="layers")
    profile = assumed_profile(model, recorded, example, flops_per_second=1e10)
    passes, number = one.layers * one.micro_batches, one.layers * one.pp
    profile = replace(
        profile,
        forward=(0.0, *[one.forward_s / passes] * number, 0.0),
        backward=(0.0, *[one.backward_s / passes] * number, 0.0),
    )
    network = NetworkCosts(pp_latency=5e-4, pp_bandwidth=12e6, dp_bandwidth=12e6, hop_latency=1e-3)
    found = []
    for rate in (one.copy_rate, one.copy_rate / 2):
        job = TrainingJob(
            trace=recorded,
            profile=profile,
            network=network,
            dp=one.dp,
            pp=one.pp,
            micro_batches=one.micro_batches,
            memory_limit=60_000_000,  # 69 MB are needed with nothing spared, 51 MB at least
            copy_bandwidth=rate,
            pool_is_elsewhere=True,
        )
        pinned = Constraints(segments=one.segments, schedule="aiao", dp_sync="early", bucket_bytes=1)
        found.append(search(job, pinned))
        spared = Spared.of(found[-1].strategy.settings)
        assert spared.recompute.nothing and spared.offload.what == "activations" and spared.offload.percent < 100
        assert found[-1].memory_bytes <= 60_000_000
    kept = search(replace(job, memory_limit=None), pinned)
    everything = replace(pinned, settings=(("recompute", "none"), ("offload", "activations")))
    assert found[0].step_ms <= found[1].step_ms < 1.02 * kept.step_ms
    assert search(job, everything).step_ms > 1.05 * kept.step_ms


class Slow(Session):
    """Answers at once; copies make a step twice as long."""

    def __init__(self) -> None:
        pass

    def run(self, scenario: Scenario, system: System, *, steps: int, warm_up: int) -> Run:
        step_s = 2.0 if system.family.offload != "none" else 1.0
        account = {"offload_exposed_ms": 5.0, "offload_gb": 0.001, "device_mb": 3.0, "pool_mb": 4.0}
        return Run(step_s=step_s, steps_s=(), stolen=0.0, sent_bytes=None, latency=NO_MESSAGES, breakdowns=(account,))


def test_a_report_says_how_much_slower() -> None:
    report = OffloadReport(scenario=SCENARIOS["smoke"], network="none", shaped=False)
    measure_offloading(report, Slow(), Effort(repetitions=1, steps=1, warm_up=1))
    assert set(report.runs) == {one.name for one in variants(SCENARIOS["smoke"])}
    assert report.slower("fold3d-aiao-early:2") is None
    assert report.slower("fold3d-aiao-activations:2 at 0.5") == pytest.approx(1.0)
    (row,) = [row for row in report.table().splitlines() if row.startswith("fold3d-aiao-boundaries:2 at 1")]
    assert row.split()[4] == "100.0%" and row.split()[7:12] == ["5.0", "0.0", "1.0", "3.0", "4.0"]


@pytest.mark.dist
def test_one_run_on_loopback(tmp_path: Path) -> None:
    """Bytes, which no clock changes: what the systems copy is what the scenario's layers save."""
    options = ["--loopback", "--offload", "smoke", "--repetitions", "1", "--steps", "1", "--json", str(tmp_path / "j")]
    done = subprocess.run([*CLUSTER, *options], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "j").read_text())
    assert not result["failures"] and len(result["offloading"]) == len(variants(SCENARIOS["smoke"]))
    (run,) = result["offloading"]["fold3d-aiao-activations:2 at 1"]["runs"]
    assert max(part["pool_mb"] for part in run["breakdowns"]) > 0


def test_hooks_copy_each_tensor_and_count_it() -> None:
    link = Link(rate=0)
    x = torch.randn(10, 10, requires_grad=True)
    with link.hooks():
        y = (x * x).sum()
    assert (link.copied, link.held) == (800, 800)  # x twice, as torch's do
    y.backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())
    del y
    gc.collect()
    assert (link.copied, link.held, link.peak) == (1600, 0, 800)


class LateClock:
    """Time passes only in sleeps, and each lasts 0.1 ms longer than it should."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-4


def test_small_copies_last_as_long_as_one_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LateClock()
    monkeypatch.setattr("benchmarks.offload.time", clock)
    link = Link(rate=1e8)
    for _ in range(512):
        link.out(torch.zeros(250))
    assert link.copied == 512 * 1000
    assert clock.now == pytest.approx(512 * 1000 / 1e8, abs=SHORTEST_S)


def found(seconds: list[float], losses: list[float]) -> Found:
    return Found(seconds=seconds, device=0, pool=0, copied=0, forward_s=0.0, losses=losses)


def test_steps_are_compared_turn_by_turn() -> None:
    """A turn in which the machine did something else, too, made both slower."""
    kept = found([1.0, 1.0, 3.0, 3.0, 3.0], [2.0])
    assert slowdown(found([1.5, 1.5, 4.5, 3.0, 4.5], [2.0]), kept) == 0.5


def test_ways_that_compute_something_else_are_refused() -> None:
    check_losses({"one": found([1.0], [2.0, 1.0]), "other": found([1.0], [2.0, 1.0])})
    with pytest.raises(RuntimeError, match=r"other: losses \[2.0, 1.5\], expected \[2.0, 1.0\]"):
        check_losses({"one": found([1.0], [2.0, 1.0]), "other": found([1.0], [2.0, 1.5])})
