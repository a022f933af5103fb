"""Two ranks on hosts of their own, as replicas and as stages at the same time: slices of DP.sync and a message."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any, TypedDict

import pytest
import torch
import torch.distributed as dist

from fold3d import _C, schedule
from fold3d.comms import connections
from fold3d.comms.groups import Groups
from fold3d.engine import builder
from fold3d.topology import Topology
from simdevice import sim
from simdevice.tests.layouts import as_on_the_cpu, failing
from tests.dist.parity_cases import Case

TIMEOUT = 60.0
DEVICE = torch.device("sim", 0)
MESSAGE = 8 << 20
"""Elements: it takes far longer than a slice, so that nobody loses patience with it soon."""
BUCKET = 256 << 10
"""Elements."""
COMPUTE_MS = 400.0
"""What the message waits for on its device."""
AGREEMENTS = 5
"""Collectives until the replicas have agreed on a speed."""
MOST_REDUCES = 1000
SLOW_NETWORK = 100e6
"""Bytes per second, at which the message takes a third of a second."""


class Seen(TypedDict):
    """By the rank that sends the message. A dict, since pytest's own process, which reads it, must not import this."""

    announced_early: bool
    """The arbiter heard of it before its data was there."""
    early: int
    """Buckets that were summed while it was launched and not ready."""
    held_early: int
    """Slices of theirs that were held back."""
    late: int
    """Buckets that were summed while it was on its way."""
    held: int
    """Slices that were held back then."""
    held_ns: int


class Arrived(TypedDict):
    """By the rank that receives the message."""

    announced_early: bool
    """Its arbiter heard of the message before the sender's device had the data."""
    early: int
    """Buckets that were summed while the message was launched on both sides and not ready."""
    held_early: int
    """Slices of theirs that this rank held back."""
    announced: int
    """Messages that its arbiter heard of in all."""
    held: int
    """Slices that it held back."""


class _Stage:
    """What the executor runs instead of a part of a model."""

    def __init__(self) -> None:
        self.compute_ms = 1.0
        self.launched = threading.Event()
        self.ready = torch.Event(DEVICE)  # type: ignore[no-untyped-call]

    def forward(self, _: int, received: list[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        """Returns the message, whose data the device has later."""
        if received:
            message = received[0] + 1
        else:
            sim.sleep(self.compute_ms)
            message = torch.full((MESSAGE,), self.compute_ms, device=DEVICE)
        self.ready.record()  # type: ignore[no-untyped-call]
        self.launched.set()
        return [message], None

    def reduce(self) -> None:
        """Forwards only."""


class _Rank:
    """A rank of each kind, behind one arbiter."""

    def __init__(self) -> None:
        self.rank = rank = dist.get_rank()
        self.stage = _Stage()
        self.arbiter = _C.NicArbiter()
        self._groups = Groups(Topology(dp=1, pp=2, rank=rank), DEVICE, TIMEOUT, ())
        limit = timedelta(seconds=TIMEOUT)
        names = [dist.new_group(backend="simccl", timeout=limit).group_name for _ in range(2)]  # type: ignore[union-attr]
        self._executor = _C.Executor(
            *([self.stage], rank, 2, self._groups.p2p_names(), DEVICE, TIMEOUT, f"stage {rank}"),
            arbiter=self.arbiter,
            hosts=[0, 1],
        )
        self._sync = _C.BucketSync(
            *(rank, 2, self.arbiter, DEVICE, TIMEOUT, f"replica {rank}"),
            slice_bytes=0,
            reduce_group=names[0],
            gather_group=names[1],
            hosts=[0, 1],
        )
        self._order = schedule.lower(schedule.forward_only(2, 1, 1), reduce=False)
        self._stream = torch.Stream(DEVICE)  # the message's data is computed on another
        self._step = 0

    def run(self) -> None:
        """Sends the message, or receives it."""
        self._executor.run(self._order, self.rank, False, range(1))

    def reduce(self) -> None:
        """Sums a bucket."""
        self._step += 1
        with self._stream:
            gradients = torch.full((BUCKET,), float(self.rank + 1), device=DEVICE)
            self._sync.begin(self._step, [])
            self._sync.reduce(0, gradients, 0.5)
            self._sync.wait_reduced(0)
            assert bool((gradients.chunk(2)[self.rank] == 1.5).all().cpu())

    def close(self) -> None:
        """Ends communication."""
        self._executor.close()
        self._sync.close()
        self._groups.close()


def slices_and_a_message(*, forgets: bool = False) -> Seen | None:
    """Buckets are summed, one after the other, while rank 0 has launched a message whose data comes later, and while it
    is on its way over a network that is slow enough to see it. Returns what rank 0 saw.

    Args:
        forgets: rank 0 does not look whether the data is there.
    """
    one = _Rank()
    one.run()
    for _ in range(AGREEMENTS):
        one.reduce()
    torch.accelerator.synchronize()
    dist.barrier()
    seen = None
    left_out = sim.left_out("event_query", "message_watch") if forgets else contextlib.nullcontext()
    with sim.network(SLOW_NETWORK):
        if one.rank == 0:
            with left_out:
                seen = _send(one)
        else:
            thread = threading.Thread(target=one.run)
            thread.start()
            while _goes_on():
                one.reduce()
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        torch.accelerator.synchronize()
    dist.barrier()
    one.close()
    return seen


def _send(one: _Rank) -> Seen:
    one.stage.compute_ms = COMPUTE_MS
    one.stage.launched.clear()
    messages, (held, held_ns) = one.arbiter.counters()["messages"], _held(one)
    thread = threading.Thread(target=one.run)
    thread.start()
    assert one.stage.launched.wait(TIMEOUT)
    early = held_early = late = 0
    announced_early = False
    for _ in range(MOST_REDUCES):
        _goes_on(True)
        one.reduce()
        if one.arbiter.counters()["messages"] == messages:
            early, held_early = early + 1, _held(one)[0] - held
        else:
            announced_early = announced_early or not one.stage.ready.query()  # type: ignore[no-untyped-call]
            late += 1
        if late > 2 and one.stage.ready.query():  # type: ignore[no-untyped-call]
            break
    found = _held(one)
    _goes_on(False)
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    return Seen(
        announced_early=announced_early,
        early=early,
        held_early=held_early,
        late=late,
        held=found[0] - held,
        held_ns=found[1] - held_ns,
    )


def slices_and_an_arrival() -> Arrived | None:
    """Buckets are summed while a message is launched on both sides, its data comes, and it travels over a network that
    is slow enough to see it. Returns what its receiver saw."""
    one = _Rank()
    one.run()
    for _ in range(AGREEMENTS):
        one.reduce()
    torch.accelerator.synchronize()
    dist.barrier()
    one.stage.compute_ms = COMPUTE_MS
    messages, held = one.arbiter.counters()["messages"], _held(one)[0]
    early = held_early = 0
    announced_early = False
    one.stage.launched.clear()
    with sim.network(SLOW_NETWORK):
        thread = threading.Thread(target=one.run)
        thread.start()
        if one.rank == 0:
            assert one.stage.launched.wait(TIMEOUT)
        for _ in range(MOST_REDUCES):
            one.reduce()
            is_announced = _says(one.arbiter.counters()["messages"] > messages, 1)
            is_ready = _says(one.stage.ready.query(), 0)  # type: ignore[no-untyped-call]
            announced_early = announced_early or (is_announced and not is_ready)
            if not is_announced:
                early, held_early = early + 1, _held(one)[0] - held
            if _says(one.stage.launched.is_set() and one.stage.ready.query(), 1):  # type: ignore[no-untyped-call]
                break  # it is there
        torch.accelerator.synchronize()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    counted = one.arbiter.counters()["messages"] - messages
    found = _held(one)[0] - held
    dist.barrier()
    one.close()
    if one.rank == 0:
        return None
    return Arrived(announced_early=announced_early, early=early, held_early=held_early, announced=counted, held=found)


def cut_buckets(slices: int, *, rounds: bool) -> list[tuple[int, int, bool]]:
    """A bucket is summed and gathered in so many slices, while others may read this replica's shard. Returns of the sum
    and of the gather how many kernels were launched, how much memory was taken meanwhile, and whether it is right.

    Args:
        rounds: it is bfloat16 that travels.
    """
    rank, length = dist.get_rank(), slices * 1024
    names = [dist.new_group(backend="simccl", timeout=timedelta(seconds=TIMEOUT)).group_name for _ in range(2)]  # type: ignore[union-attr]
    sync = _C.BucketSync(
        *(rank, 2, _C.NicArbiter(), DEVICE, TIMEOUT, f"replica {rank}"),
        slice_bytes=1024 * (2 if rounds else 4),
        reduce_group=names[0],
        gather_group=names[1],
        hosts=[0, 1],
    )
    places = torch.arange(2.0 * length, device=DEVICE) % 64
    bucket = places * (rank + 1)
    own, read = bucket.chunk(2)[rank], torch.zeros((), device=DEVICE)
    found = []
    sync.begin(1, [])
    for act in ("reduce", "gather"):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        launches, memory = sim.launches(), torch.accelerator.memory_allocated()
        if act == "reduce":
            sync.reduce(0, bucket, 1.0, as_bfloat16=rounds)
            sync.wait_reduced(0)
        else:
            sync.gather(0, bucket, as_bfloat16=rounds)
            torch.sum(own, 0, out=read)  # beside the gather
            sync.wait_gathered(0)
        sync.drain()
        launches, memory = (
            sim.launches() - launches - (act == "gather"),
            torch.accelerator.max_memory_allocated() - memory,
        )
        right = (own if act == "reduce" else bucket) == 3 * (places.chunk(2)[rank] if act == "reduce" else places)
        found.append((launches, memory, bool(right.all().cpu())))
    assert read.item() == 3 * places.chunk(2)[rank].sum().item()
    sync.close()
    return found


def _held(one: _Rank) -> tuple[int, int]:
    counters = one.arbiter.counters()
    return counters["preemptions"], counters["held_ns"]


def _goes_on(said: bool = False) -> bool:
    """Returns what rank 0 says."""
    return _says(said, 0)


def _says(what: bool, rank: int) -> bool:
    """Returns what that rank says."""
    word = torch.tensor([what])
    dist.broadcast(word, rank)
    return bool(word.item())


def as_on_the_cpu_over_cards(case: Case, hosts: str, microseconds: int) -> dict[str, int]:
    """Trains the case on both where the ranks lie on these hosts, and asserts that the numbers are the same; returns
    what the arbiter of the device's run counted."""
    arbiters: list[Any] = []

    def join(*args: Any, **kwargs: Any) -> Any:
        arbiters.append(connections.join_nic_arbiter(*args, **kwargs))
        return arbiters[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "host_identity", lambda: hosts[dist.get_rank()])
        patch.setattr(builder, "join_nic_arbiter", join)
        over_cards = case.dp > 1 and hosts[0] != hosts[1]  # two stages of a replica
        looks_on = sim.left_out("news", "message_watch") if over_cards else contextlib.nullcontext()
        with looks_on:
            as_on_the_cpu(case, microseconds)
    return dict(arbiters[-1].counters())


def failing_over_cards(case: Case, hosts: str, bad_rank: int) -> tuple[float, str]:
    """As layouts.failing, where the ranks lie on these hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "host_identity", lambda: hosts[dist.get_rank()])
        return failing(case, bad_rank)
