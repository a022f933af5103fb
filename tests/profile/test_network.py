"""measure_network against links of known speed; the clock is the test's own."""

from __future__ import annotations

import math
import time

import pytest

from fold3d.plan.costs import NetworkCosts, pause_bytes
from fold3d.profile.network import measure_network, measure_shards


class Wire:
    """Ways to send bytes that take `latency` and `bandwidth`, by moving the clock."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        self.calls = 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def pass_on(self, size):
        self.calls += 1
        self.now += 2 * (1e-4 + size / 1e8)

    def sum_up(self, size):  # dp = 4
        self.calls += 1
        self.now += 6 * 5e-5 + 6 / 4 * size / 5e7


def test_speeds_are_found(monkeypatch):
    wire = Wire(monkeypatch)
    found = measure_network(
        pass_on=wire.pass_on, sum_up=wire.sum_up, slowest=lambda x: x, dp=4, activation_bytes=8192, seconds=1.0
    )
    assert found.pp_latency == pytest.approx(1e-4, rel=0.01)
    assert found.pp_bandwidth == pytest.approx(1e8, rel=0.01)
    assert found.hop_latency == pytest.approx(5e-5, rel=0.01)
    assert found.dp_bandwidth == pytest.approx(5e7, rel=0.01)
    assert wire.now < 2 * 1.0
    assert found.bandwidth == found.dp_bandwidth


def test_a_machine_that_is_busy_at_first_does_not_count_as_a_slow_link(monkeypatch):
    wire = Wire(monkeypatch)
    fast = wire.pass_on

    def pass_on(size):
        fast(size)
        wire.now += 0.05 if wire.calls == 2 else 0.003 if wire.calls <= 10 else 0.0

    found = measure_network(pass_on=pass_on, sum_up=None, slowest=lambda x: x, dp=1, activation_bytes=8192, seconds=1.0)
    assert found.pp_latency == pytest.approx(1e-4, rel=0.01)
    assert found.pp_bandwidth == pytest.approx(1e8, rel=0.01)


def test_slow_links_are_asked_a_few_times_only(monkeypatch):
    wire = Wire(monkeypatch)

    def pass_on(size):
        wire.calls += 1
        wire.now += 0.5

    measure_network(pass_on=pass_on, sum_up=None, slowest=lambda x: x, dp=1, activation_bytes=8192, seconds=1.0)
    assert wire.calls < 20


def test_the_slowest_rank_decides_for_all(monkeypatch):
    wire = Wire(monkeypatch)
    found = measure_network(
        pass_on=wire.pass_on, sum_up=None, slowest=lambda x: [3 * value for value in x], dp=1, activation_bytes=0
    )
    assert found.pp_latency == pytest.approx(3e-4, rel=0.01)
    assert found.pp_bandwidth == pytest.approx(1e8 / 3, rel=0.01)
    assert found.dp_bandwidth == found.pp_bandwidth


def test_without_a_network():
    def never(size):
        raise AssertionError

    found = measure_network(pass_on=None, sum_up=None, slowest=never, dp=1, activation_bytes=8192)
    assert found.bandwidth == 1e13 and found.pp_latency == 0


def test_what_cannot_be_paused_follows_the_bandwidth():
    assert pause_bytes(1e6) == (8 << 10) + (4 << 10)
    assert pause_bytes(128e6) == 128_000 + 51_200
    assert pause_bytes(1e10) == (4 << 20) + 4_000_000
    with pytest.raises(ValueError, match="positive and finite"):
        pause_bytes(math.inf)


@pytest.mark.parametrize("size", [1 << 14, 1 << 20, 1 << 24])
@pytest.mark.parametrize(
    ("share", "other", "spare"), [(0.0, 0, 0), (0.3, 0, 0), (1.0, 0, 0), (0.3, 0.5, 0), (0.3, 0, 1)]
)
def test_what_the_links_threads_take_from_computing(monkeypatch, size, share, other, spare):
    """Each byte takes `share` of the time in which it travels from those who compute, unless there are cores to spare;
    what else the machine does takes time of its own."""
    wire, cores = Wire(monkeypatch), [0.0]
    monkeypatch.setattr(time, "process_time", lambda: cores[0])

    def sum_up(size):  # tp = 2
        wire.now += 2 * 5e-5 + size / 1e8

    def compute(times, sums, size):
        taken = share * sums * size / 1e8
        cores[0] += 50e-6 * times + taken
        wire.now += max(50e-6 * times + (0 if spare else taken) + other * sums * size / 1e8, sums * size / 1e8)

    found = measure_shards(sum_up=sum_up, compute=compute, slowest=lambda x: x, tp=2, size=size)
    assert found.bandwidth == pytest.approx(1e8, rel=0.05)
    assert found.toll == pytest.approx(0 if spare else share / 1e8, rel=0.05, abs=1e-12)
    assert found.of(NetworkCosts(pp_latency=0, pp_bandwidth=1, dp_bandwidth=1, hop_latency=0)).tp_toll == found.toll
    assert wire.now < 3.0


@pytest.mark.parametrize(("share", "spare"), [(0.0, False), (0.3, False), (0.3, True)])
def test_what_sums_over_the_replicas_take_from_computing(monkeypatch, share, spare):
    wire, cores = Wire(monkeypatch), [0.0]
    monkeypatch.setattr(time, "process_time", lambda: cores[0])

    def compute(times, sums, size):  # reduce-scatters of four replicas
        sent = 3 / 4 * sums * size / 5e7
        taken = share * sent
        cores[0] += 50e-6 * times + taken
        wire.now += max(50e-6 * times + (0 if spare else taken), sent)

    found = measure_network(
        pass_on=None, sum_up=wire.sum_up, slowest=lambda x: x, dp=4, activation_bytes=8192, compute=compute
    )
    assert found.dp_bandwidth == pytest.approx(5e7, rel=0.01)
    assert found.toll == pytest.approx(0 if spare else share / 5e7, rel=0.05, abs=1e-12)
