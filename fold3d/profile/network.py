"""measure_network(), measure_shards(): latency and bandwidth of the links that PP.sync, DP.sync and TP.sync use, the
same numbers on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fold3d.plan.costs import NetworkCosts

_SMALL = 64  # bytes of a message that is all latency
_FEW = 5  # repetitions, of which the fastest counts: whatever else happens only adds time
_LATENCY_SHARE = 0.1  # of the time for measuring, for each latency: one of its rounds should meet a machine at rest
_MOST_ROUNDS = 100
_LEAST_BURST = 1 << 18  # bytes
_MOST_BURST = 1 << 28
_BESIDE_SECONDS = 0.02  # of exchanges beside which something is computed


@dataclass(frozen=True, slots=True)
class ShardLink:
    """What links the ranks of a tensor-parallel group."""

    bandwidth: float
    """Bytes per second that a rank sends."""
    latency: float
    """Seconds for a hop."""
    toll: float = 0.0
    """Seconds that a rank computes longer for each byte that it sends meanwhile."""

    def of(self, network: NetworkCosts) -> NetworkCosts:
        """Returns the network with this link."""
        return replace(network, tp_bandwidth=self.bandwidth, tp_latency=self.latency, tp_toll=self.toll)


def measure_network(
    *,
    pass_on: Callable[[int], None] | None,
    sum_up: Callable[[int], None] | None,
    slowest: Callable[[list[float]], list[float]],
    dp: int,
    activation_bytes: int,
    seconds: float = 1.0,
) -> NetworkCosts:
    """Returns what the slowest rank measured; all ranks call it with the same arguments.

    Args:
        pass_on: exchanges messages of so many bytes with the neighbouring stages, one way and back, and returns when
            they are here. None: there is one stage.
        sum_up: sums so many bytes over the replicas, as DP.sync does, and returns when the sum is here. None: there is
            one replica.
        slowest: element-wise maximum over all ranks.
        activation_bytes: of a pipeline message.
        seconds: about how long to measure; growing to the size that is measured may take as long again.
    """
    pp_latency, pp_bandwidth = 0.0, math.inf
    if pass_on is not None:
        pass_on(_SMALL)  # connects
        pp_latency = _latency(pass_on, seconds * _LATENCY_SHARE, slowest) / 2
        size = max(_LEAST_BURST, activation_bytes)
        size, spent = _grow(pass_on, size, seconds / 4, slowest)
        pp_bandwidth = size / _without(spent / 2, pp_latency)
    hop_latency, dp_bandwidth = pp_latency, pp_bandwidth
    if sum_up is not None:
        hops = 2 * (dp - 1)
        sum_up(_SMALL)
        hop_latency = _latency(sum_up, seconds * _LATENCY_SHARE, slowest) / hops
        size, spent = _grow(sum_up, _LEAST_BURST, seconds / 2, slowest)
        dp_bandwidth = hops / dp * size / _without(spent, hops * hop_latency)
        if pass_on is None:
            pp_latency, pp_bandwidth = hop_latency, dp_bandwidth
    return NetworkCosts(
        pp_latency=pp_latency, pp_bandwidth=pp_bandwidth, dp_bandwidth=dp_bandwidth, hop_latency=hop_latency
    )


def measure_shards(
    *,
    sum_up: Callable[[int], None],
    compute: Callable[[int, int, int], None],
    slowest: Callable[[list[float]], list[float]],
    tp: int,
    size: int,
    seconds: float = 0.4,
) -> ShardLink:
    """Returns what the slowest rank measured of TP.sync; all ranks call it with the same arguments.

    Args:
        sum_up: sums so many bytes over the tensor-parallel group and returns when the sum is here.
        compute: does a small piece of work so many times, while a number of sums of so many bytes travel, and returns
            when both are done.
        size: bytes of a sum in training, the largest.
        seconds: about how long to measure.
    """
    sum_up(_SMALL)
    latency = _latency(sum_up, seconds * _LATENCY_SHARE, slowest) / (tp - 1)  # small tensors go round once
    hops = 2 * (tp - 1)
    burst, spent = _grow(sum_up, max(_LEAST_BURST, size), seconds / 2, slowest)
    bandwidth = hops / tp * burst / _without(spent, hops * latency)
    # Sums as sub-micro-batches make them, but on slow links, where they take long and few cores' time.
    half = max(1, min(size // 2, round(bandwidth * _BESIDE_SECONDS)))
    return ShardLink(bandwidth, latency, _toll(compute, half, hops / tp * half, bandwidth, slowest))


def _toll(
    compute: Callable[[int, int, int], None],
    size: int,
    sent: float,
    bandwidth: float,
    slowest: Callable[[list[float]], list[float]],
) -> float:
    """Returns by how much each byte that a rank sends while it computes delays its computing, in seconds: no longer
    than both take the cores' time, which says nothing of cores to spare, and delay it here, to which other work on the
    machine adds.

    Args:
        size: bytes of a sum; it sends `sent` of them.
    """
    count = max(1, min(_MOST_ROUNDS, round(_BESIDE_SECONDS * bandwidth / sent)))
    lasting, times = count * sent / bandwidth, 1

    def spent(sums: int, times: int) -> tuple[float, float]:
        begin, cores = time.perf_counter(), time.process_time()
        compute(times, sums, size)
        return time.perf_counter() - begin, time.process_time() - cores

    # Longer than the sums travel, so that all they take is taken from it.
    while slowest([spent(0, times)[0]])[0] < 2 * lasting and times < _MOST_BURST:
        times *= 2
    # In turns: what else the machine does would count for one of them.
    rounds = [(*spent(0, times), *spent(count, times)) for _ in range(_FEW)]
    alone, alone_cores, beside, beside_cores = slowest([min(one) for one in zip(*rounds, strict=True)])
    delay = max(0.0, min(beside - alone, beside_cores - alone_cores))
    return min(1 / bandwidth, delay / (count * sent))


def _without(spent: float, latency: float) -> float:
    """Returns the time that the bytes took: at least half, because latencies vary from one measurement to the next."""
    return max(1e-9, spent - latency, spent / 2)


def _time(action: Callable[[int], None], size: int) -> float:
    begin = time.perf_counter()
    action(size)
    return time.perf_counter() - begin


def _fastest(action: Callable[[int], None], size: int, rounds: int = _FEW) -> float:
    return min(_time(action, size) for _ in range(rounds))


def _latency(action: Callable[[int], None], seconds: float, slowest: Callable[[list[float]], list[float]]) -> float:
    """Returns the seconds of the fastest of at least a few rounds with small messages, for about `seconds`."""
    # Agreed, so that all ranks make as many.
    once = slowest([_fastest(action, _SMALL)])[0]
    rounds = max(_FEW, min(_MOST_ROUNDS, round(seconds / max(once, 1e-9))))
    return min(once, slowest([_fastest(action, _SMALL, rounds)])[0])


def _grow(
    action: Callable[[int], None], size: int, seconds: float, slowest: Callable[[list[float]], list[float]]
) -> tuple[int, float]:
    """Doubles the size until once takes `seconds` / _FEW; returns it with the seconds of the fastest of a few times."""
    # Agreed, so that all ranks go on or stop together.
    while slowest([_time(action, size)])[0] < seconds / _FEW and size < _MOST_BURST:
        size *= 2
    return size, slowest([_fastest(action, size)])[0]
