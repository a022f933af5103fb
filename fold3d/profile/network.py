"""Latency and bandwidth of the links that PP.sync, DP.sync and TP.sync use, measured by what training will use; the
same numbers on all ranks. copy_bandwidth(): how fast stashes leave a rank's device and come back.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fold3d import _C
from fold3d.comms.connections import connect_replicas, connect_shards, connect_stages, find_hosts
from fold3d.comms.groups import Groups
from fold3d.device import is_accelerator, synchronize
from fold3d.plan.costs import NetworkCosts

_SMALL = 64  # bytes of a message that is all latency
_FEW = 5  # repetitions, of which the fastest counts: whatever else happens only adds time
_LATENCY_SHARE = 0.1  # of the time for measuring, for each latency: one of its rounds should meet a machine at rest
_MOST_ROUNDS = 100
_LEAST_BURST = 1 << 18  # bytes
_MOST_BURST = 1 << 28
_BESIDE_SECONDS = 0.02  # of exchanges beside which something is computed
_PIECE = 1 << 22  # bytes of one of them at most


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
    compute: Callable[[int, int, int], None] | None = None,
    shares_cores: bool = True,
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
        compute: does a small piece of work so many times, while so many reduce-scatters (of one replica: messages) of
            so many bytes are sent, and returns when both are done. None: nobody looks whether they delay it.
        shares_cores: whether what moves bytes takes the cores that compute.
    """
    toll = 0.0
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
    if compute is not None and math.isfinite(dp_bandwidth):
        part = (dp - 1) / dp if sum_up is not None else 2.0  # of the size is sent
        piece = max(1, min(_PIECE, round(dp_bandwidth * _BESIDE_SECONDS / part)))
        toll = _toll(compute, piece, part * piece, dp_bandwidth, slowest, shares_cores=shares_cores)
    return NetworkCosts(
        pp_latency=pp_latency,
        pp_bandwidth=pp_bandwidth,
        dp_bandwidth=dp_bandwidth,
        hop_latency=hop_latency,
        toll=toll,
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
        compute: does a small piece of work so many times, while a number of sums of so many bytes run, and returns
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
    *,
    shares_cores: bool = True,
) -> float:
    """Returns by how much each byte that a rank sends while it computes delays its computing, in seconds: where both
    share cores no longer than both take the cores' time, which says nothing of cores to spare, and delay it here, to
    which other work on the machine adds.

    Args:
        size: bytes of a sum; it sends `sent` of them.
    """
    count = max(1, min(_MOST_ROUNDS, round(_BESIDE_SECONDS * bandwidth / sent)))
    lasting, times = count * sent / bandwidth, 1

    def spent(sums: int, times: int) -> tuple[float, float]:
        begin, cores = time.perf_counter(), time.process_time()
        compute(times, sums, size)
        return time.perf_counter() - begin, time.process_time() - cores

    # Longer than the sums take, so that all they take is taken from it.
    while slowest([spent(0, times)[0]])[0] < 2 * lasting and times < _MOST_BURST:
        times *= 2
    # In turns: what else the machine does would count for one of them.
    rounds = [(*spent(0, times), *spent(count, times)) for _ in range(_FEW)]
    alone, alone_cores, beside, beside_cores = slowest([min(one) for one in zip(*rounds, strict=True)])
    delay = max(0.0, min(beside - alone, beside_cores - alone_cores if shares_cores else math.inf))
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


_FLOAT = 4  # bytes
_MATRIX = 128  # rows and columns of what is multiplied beside sums: some dozens of microseconds

Action = Callable[[int], None]
"""Moves so many bytes and returns when they are here."""


def probe_network(
    groups: Groups, timeout: float, *, over_tcp: bool, activation_bytes: int, seconds: float = 1.0
) -> NetworkCosts:
    """Returns latency and bandwidth of PP.sync and DP.sync, the slowest of all ranks; all ranks of the job call it.

    All pipelines and all replicas measure at the same time, so ranks that share a network card share it here, too.

    Args:
        groups: with p2p groups and rings unless `over_tcp`; tensors that are sent are on their device.
        timeout: seconds that no message and no sum may take longer than.
        over_tcp: as in training: connections and rings of our own, else torch's process groups.
        activation_bytes: of a pipeline message.
        seconds: about how long to measure, at most twice as long.
    Raises: RuntimeError (CommError, or torch's own) when a rank is gone or does not come.
    """
    topology, device = groups.topology, groups.device
    with ExitStack() as stack:
        pass_on = sum_up = start = None
        if topology.pp > 1:
            messages = tcp_messages(groups, timeout) if over_tcp else _messages(groups)
            pass_on = stack.enter_context(messages)
            mover = stack.enter_context(ThreadPoolExecutor(1, "fold3d-probe"))
            start = _moving(mover, pass_on)
        if topology.dp > 1:
            sums = _ring_sums(groups, timeout) if over_tcp else _sums(groups)
            sum_up, start = stack.enter_context(sums)
        return measure_network(
            pass_on=pass_on,
            sum_up=sum_up,
            slowest=_slowest(groups),
            dp=topology.dp,
            activation_bytes=activation_bytes,
            seconds=seconds,
            compute=None if start is None else _computing(start, device),
            shares_cores=device.type == "cpu",
        )


Start = Callable[[int, int], Callable[[], None]]
"""Starts so many transfers of so many bytes; returns what waits for them."""


def _moving(mover: ThreadPoolExecutor, pass_on: Action) -> Start:
    """Returns what passes messages on beside what its caller does."""

    def start(count: int, size: int) -> Callable[[], None]:
        moved = [mover.submit(pass_on, size) for _ in range(count)]

        def wait() -> None:
            for one in moved:
                one.result()

        return wait

    return start


def _computing(start: Start, device: torch.device) -> Callable[[int, int, int], None]:
    """Returns what multiplies small matrices so many times beside transfers."""
    matrix = torch.zeros(_MATRIX, _MATRIX, device=device)

    def compute(times: int, count: int, size: int) -> None:
        wait = start(count, size)
        for _ in range(times):
            torch.mm(matrix, matrix)
        wait()
        synchronize(device)

    return compute


def probe_shards(groups: Groups, timeout: float, *, over_tcp: bool, size: int, seconds: float = 0.4) -> ShardLink:
    """Returns the link of TP.sync of the slowest rank; all ranks of the job call it.

    All tensor-parallel groups measure at the same time, so ranks that share a network card share it here, too.

    Args:
        size: bytes of a sum in training.
        seconds: about how long to measure, at most twice as long, but for some tenths of a second in which is computed.
    Raises: RuntimeError (CommError, or torch's own) when a rank is gone or does not come.
    """
    topology, device, arbiter = groups.topology, groups.device, _C.NicArbiter("", True)
    shards = connect_shards(topology, groups, arbiter, timeout, over_tcp=over_tcp, hosts=find_hosts(groups))

    def sum_up(size: int) -> None:
        numbers = torch.zeros(-(-size // _FLOAT), device=device)
        torch.ops.fold3d.tp_all_reduce(numbers, shards.group, "sum")
        synchronize(device)

    room = torch.zeros(0, device=device)

    def start(sums: int, size: int) -> Callable[[], None]:
        nonlocal room
        each = -(-size // _FLOAT)
        if room.numel() < sums * each:
            room = torch.zeros(sums * each, device=device)
        numbers = [room[number * each : (number + 1) * each] for number in range(sums)]
        started = [torch.ops.fold3d.tp_all_reduce_start_(one, shards.group) for one in numbers]

        def finish() -> None:
            for one in started:
                torch.ops.fold3d.tp_finish(one)

        return finish

    try:
        with groups.world.progress.life.ending(shards):
            return measure_shards(
                sum_up=sum_up,
                compute=_computing(start, device),
                slowest=_slowest(groups),
                tp=topology.tp,
                size=size,
                seconds=seconds,
            )
    finally:
        shards.close()


def _slowest(groups: Groups) -> Callable[[list[float]], list[float]]:
    def slowest(values: list[float]) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64)
        groups.world.all_reduce(found, torch.maximum)
        return [float(value) for value in found]

    return slowest


class _Watch:
    """Ends the connections when one wait takes too long. A thread of its own, which no wait wakes: they are timed."""

    def __init__(self, peers: _C.TcpPeers, timeout: float) -> None:
        self._peers, self._timeout = peers, timeout
        self._lock = threading.Lock()
        self._wait: tuple[float, int] | None = None  # deadline, stage
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fold3d-probe-watch", daemon=True)
        self._thread.start()

    def waits_for(self, stage: int) -> None:
        """This rank waits for `stage` from now on."""
        with self._lock:
            self._wait = (time.monotonic() + self._timeout, stage)

    def rests(self) -> None:
        """This rank waits for nobody."""
        with self._lock:
            self._wait = None

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        left = self._timeout
        while not self._ended.wait(left):
            with self._lock:
                wait = self._wait
            left = self._timeout if wait is None else wait[0] - time.monotonic()
            if wait is not None and left <= 0:
                self._peers.abort(
                    f"stage {wait[1]} did not answer within {self._timeout:g} s while the network was measured "
                    "(setting comm_timeout)"
                )
                return


@contextmanager
def tcp_messages(groups: Groups, timeout: float) -> Iterator[Action]:
    """All stages at once: a message to the next stage, then one to the stage before, as in forward and backward."""
    topology = groups.topology
    peers = connect_stages(topology, groups.world, timeout)
    stage = topology.pp_rank
    watch = _Watch(peers, timeout)

    def pass_on(size: int) -> None:
        mine, other = (torch.zeros(max(1, size), dtype=torch.uint8) for _ in range(2))
        for forward in (True, False):
            sends = stage < topology.pp - 1 if forward else stage > 0
            receives = stage > 0 if forward else stage < topology.pp - 1
            arrival = receiver.submit(peers.recv, other, forward) if receives else None
            ahead, behind = (stage + 1, stage - 1) if forward else (stage - 1, stage + 1)
            if sends:
                watch.waits_for(ahead)
                peers.send(mine, forward)
            if arrival is not None:
                watch.waits_for(behind)
                arrival.result()
            watch.rests()

    with ThreadPoolExecutor(1, "fold3d-probe") as receiver:
        try:
            with groups.world.progress.life.ending(peers):
                yield pass_on
        finally:
            watch.end()
            peers.abort("the network has been measured")


@contextmanager
def _ring_sums(groups: Groups, timeout: float) -> Iterator[tuple[Action, Start]]:
    topology, arbiter = groups.topology, _C.NicArbiter("", True)
    sync = connect_replicas(topology, groups, arbiter, groups.device, timeout, over_tcp=True)
    steps = iter(range(1, 1 << 30))

    def sum_up(size: int) -> None:
        gradients = torch.zeros(-(-size // (_FLOAT * topology.dp)) * topology.dp)
        sync.begin(next(steps), [])
        sync.reduce(0, gradients, 1.0)
        sync.wait_reduced(0)
        sync.gather(0, gradients)
        sync.wait_gathered(0)

    room = torch.zeros(0)

    def start(count: int, size: int) -> Callable[[], None]:
        nonlocal room
        each = -(-size // (_FLOAT * topology.dp)) * topology.dp
        if room.numel() < count * each:
            room = torch.zeros(count * each)
        sync.begin(next(steps), [])
        for bucket in range(count):
            sync.reduce(bucket, room[bucket * each : (bucket + 1) * each], 1.0)

        def wait() -> None:
            for bucket in range(count):
                sync.wait_reduced(bucket)

        return wait

    try:
        with groups.world.progress.life.ending(sync):
            yield sum_up, start
    finally:
        sync.close()


@contextmanager
def _messages(groups: Groups) -> Iterator[Action]:
    """As tcp_messages, by torch's process groups."""
    topology, device = groups.topology, groups.device
    stages, stage = topology.pipeline(topology.dp_rank), topology.pp_rank

    def pass_on(size: int) -> None:
        for direction, step in (("forward", 1), ("backward", -1)):
            ways = ((dist.irecv, "recv", stage - step), (dist.isend, "send", stage + step))
            works: list[Any] = []
            for way, what, peer in ways:
                if 0 <= peer < topology.pp:
                    message = torch.zeros(max(1, size), dtype=torch.uint8, device=device)
                    works.append(way(message, stages[peer], groups.p2p[f"{what}_{direction}"]))
            for work in works:
                work.wait()
        synchronize(device)

    yield pass_on


@contextmanager
def _sums(groups: Groups) -> Iterator[tuple[Action, Start]]:
    """What a ring of replicas sends, without the sums: gloo's own all-reduce is slower than fold3d's. NCCL's is not."""
    dp, replica, device = groups.topology.dp, groups.topology.dp_rank, groups.device

    def ring(size: int) -> None:
        mine = torch.zeros(max(1, size // dp), dtype=torch.uint8, device=device)
        other = torch.empty_like(mine)
        for _ in range(2 * (dp - 1)):
            both = (dist.irecv, other, (replica - 1) % dp), (dist.isend, mine, (replica + 1) % dp)
            group = groups.rings["reduce"]
            works = dist.batch_isend_irecv(
                [dist.P2POp(way, at, group=group, group_peer=peer) for way, at, peer in both]
            )
            for work in works:
                work.wait()

    def all_reduce(size: int) -> None:
        dist.all_reduce(torch.zeros(max(1, size // _FLOAT), device=device), group=groups.data.library)
        synchronize(device)

    def start(count: int, size: int) -> Callable[[], None]:
        # Half of an all-reduce is what a reduce-scatter sends.
        made = [torch.zeros(max(1, size // (2 * _FLOAT)), device=device) for _ in range(count)]
        works = [dist.all_reduce(one, group=groups.data.library, async_op=True) for one in made]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    yield ring if device.type == "cpu" else all_reduce, start


_BYTES = 16 << 20
_RUNS = 3


def copy_bandwidth(device: torch.device, disk: str | None) -> float:
    """Returns bytes per second between `device` and host memory, or a file in the folder `disk`; of the directions the
    slower. Any rank may call it alone.

    Ranks of a host that share the way to its memory measure at the same time, so each gets its share.

    Raises: OSError for a folder that cannot be written to.
    """
    if disk is not None:
        return _BYTES / _writing(disk)
    here = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    there = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=is_accelerator(device))
    out, back = (_copying(target, source, device) for target, source in ((there, here), (here, there)))
    return _BYTES / max(out, back)


def _copying(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Returns the seconds of a copy; the first of several is not counted."""
    times = []
    for _ in range(_RUNS + 1):
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _writing(disk: str) -> float:
    """Returns the seconds until so many bytes are on the disk."""
    with tempfile.TemporaryFile(dir=disk) as file:
        begin = time.perf_counter()
        file.write(bytes(_BYTES))
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - begin
