"""TreeGroup and WorldGroup: what comes out, with which bits, over how many connections, and how a wait ends."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fold3d import Engine, ParallelConfig
from fold3d.comms.shared_gloo import connect_few
from fold3d.comms.tree_group import FAN_OUT, Family, Tree, TreeGroup, broadcast_value
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import ConfigError, RankError
from fold3d.faults.progress import Progress
from fold3d.topology import Topology
from tests.helpers.ranks import RankPool
from tests.helpers.trees import connections, messages

LIMIT = 30.0
_BYTES_ACKED = 120  # where tcp_info has the number of bytes that the other side has, after 8 bytes and 24 numbers


def tree_group(fan_out: int, *, timeout: float = LIMIT, progress: Progress | None = None) -> TreeGroup:
    size, rank = dist.get_world_size(), dist.get_rank()
    return TreeGroup(
        range(size),
        rank,
        "test",
        patience=LIMIT,
        timeout=timeout,
        progress=progress or Progress(),
        tree=Tree(size, fan_out),
    )


def world_group(dp: int, tp: int = 1) -> WorldGroup:
    return WorldGroup(Topology(dp=dp, pp=dist.get_world_size() // (dp * tp), tp=tp, rank=dist.get_rank()), LIMIT)


def own(rank: int) -> torch.Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


POINTS = torch.complex(torch.arange(3.0), torch.arange(3.0, 6.0))


def everything(fan_out: int) -> dict[str, Any]:
    group, rank = tree_group(fan_out), dist.get_rank()
    total = own(rank)
    group.all_reduce(total)
    most = torch.tensor([rank, -rank])
    group.all_reduce(most, torch.maximum)
    first = torch.full((2, 3), float(rank)).bfloat16().t()
    group.broadcast(first)
    empty = torch.empty(0)
    group.broadcast(empty)
    of_each = [torch.full((3,), float(rank)) for _ in range(group.size)]
    for source, tensor in enumerate(of_each):
        group.broadcast(tensor, source)
    found = {
        "of each": [tensor.tolist() for tensor in of_each],
        "shares": [group.share(f"of {rank}", source) for source in range(group.size)],
        "value": broadcast_value({"at": [torch.full((2,), rank), rank]}, group.size - 1, group),
        "views": broadcast_value((POINTS.conj(), POINTS.conj().imag), group.size - 1, group),
        "sum": total,
        "most": most.tolist(),
        "first": first.float().tolist(),
        "gather": group.gather({"rank": rank, "text": "x" * 1000 * rank}),
        "share": group.share(f"of {rank}"),
        "all_gather": torch.stack(group.all_gather(own(rank))),
        "flags": [flag.item() for flag in group.all_gather(torch.tensor(rank % 2 == 1))],
    }
    group.close()
    return found


def expected_sum(tree: Tree, member: int = 0) -> torch.Tensor:
    parts = [own(member), *(expected_sum(tree, child) for child in tree.children(member))]
    return functools.reduce(operator.add, parts)


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("size, fan_out", [(1, 4), (2, 4), (4, 2), (4, 1), (4, 4), (8, 2)])
def test_values_and_bits(ranks8: RankPool, size: int, fan_out: int) -> None:
    for rank, found in enumerate(ranks8.run(everything, size, fan_out)):
        assert torch.equal(found["sum"], expected_sum(Tree(size, fan_out))), "the order of the tree, on every rank"
        assert found["most"] == [size - 1, 0]
        assert found["first"] == [[0.0, 0.0]] * 3
        wanted = [{"rank": other, "text": "x" * 1000 * other} for other in range(size)]
        assert found["gather"] == (wanted if rank == 0 else None)
        assert found["share"] == "of 0"
        assert found["of each"] == [[float(source)] * 3 for source in range(size)]
        assert found["shares"] == [f"of {source}" for source in range(size)]
        tensor, number = found["value"]["at"]
        assert tensor.tolist() == [size - 1] * 2 and number == size - 1
        conjugate, negative = found["views"]
        assert conjugate.tolist() == [3j.conjugate(), 1 - 4j, 2 - 5j] and negative.tolist() == [-3.0, -4.0, -5.0]
        assert torch.equal(found["all_gather"], torch.stack([own(other) for other in range(size)]))
        assert found["flags"] == [other % 2 == 1 for other in range(size)]


def of_all(dp: int) -> tuple[torch.Tensor, Any, Any, list[str]]:
    world, rank = world_group(dp), dist.get_rank()
    total = own(rank)
    world.all_reduce(total)
    errors = []
    for verdict in (_refuse, _break):
        try:
            world.decide(rank, verdict)
        except (ConfigError, RankError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    found = total, world.gather(rank), world.decide(rank, sum), errors
    world.close()
    return found


def _refuse(values: list[int]) -> None:
    raise ConfigError(f"not with {values}")


def _break(values: list[int]) -> None:
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_two_levels(ranks: RankPool, dp: int) -> None:
    pp = 4 // dp
    stages = [functools.reduce(operator.add, [own(r * pp + s) for r in range(dp)]) for s in range(pp)]
    total = functools.reduce(operator.add, stages)
    refusals = ["ConfigError: not with [0, 1, 2, 3]"]
    refusals += ["RankError: rank 0 (replica 0, stage 0) failed: ZeroDivisionError: broken"]
    for rank, (ours, gathered, decided, errors) in enumerate(ranks.run(of_all, 4, dp)):
        assert torch.equal(ours, total), "the sums over the replicas, then over the stages"
        assert gathered == ([0, 1, 2, 3] if rank == 0 else None) and decided == 6
        assert errors == refusals


def of_three_axes(dp: int, tp: int) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, Any], tuple[Any, Any]]:
    world, rank = world_group(dp, tp), dist.get_rank()
    total, of_replica = own(rank), own(rank)
    world.all_reduce(total)
    world.all_reduce_replica(of_replica)
    of_all = world.gather(f"of {rank}"), world.share(f"of {rank}")
    in_replica = world.gather_replica(f"of {rank}"), world.share_replica(f"of {rank}")
    found = total, of_replica, of_all, in_replica
    world.close()
    return found


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp, pp, tp", [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_three_levels(ranks8: RankPool, dp: int, pp: int, tp: int) -> None:
    """The order of a sum does not depend on who asks; what is gathered lies by rank, where tp is the fastest axis."""

    def value(d: int, p: int, t: int) -> torch.Tensor:
        return own((d * pp + p) * tp + t)

    def total(of: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        shards = [functools.reduce(operator.add, [of(p, t) for p in range(pp)]) for t in range(tp)]
        return functools.reduce(operator.add, shards)

    world = total(lambda p, t: functools.reduce(operator.add, [value(d, p, t) for d in range(dp)]))
    everybody = [f"of {rank}" for rank in range(dp * pp * tp)]
    for rank, (ours, of_replica, of_all, in_replica) in enumerate(ranks8.run(of_three_axes, len(everybody), dp, tp)):
        replica, place = divmod(rank, pp * tp)
        first = rank - place
        assert torch.equal(ours, world), "over the replicas, then the stages, then the shards"
        assert torch.equal(of_replica, total(functools.partial(value, replica)))
        assert of_all == (everybody if rank == 0 else None, "of 0")
        assert in_replica == (None if place else everybody[first : first + pp * tp], f"of {first}")


def test_a_world_of_one_needs_nobody() -> None:
    world = WorldGroup(Topology(dp=1, pp=1, rank=0), LIMIT)
    value = torch.tensor([3.0])
    world.all_reduce(value)
    world.barrier()
    assert value.item() == 3.0 and world.gather("a") == ["a"] and world.share(5) == 5
    assert world.data.all_gather(value)[0].item() == 3.0


# Connections and messages, as the system counts them


def _connected() -> list[socket.socket]:
    """Returns this process's connected TCP sockets, as copies."""
    found, names = [], []
    for name in os.listdir("/proc/self/fd"):  # before the first copy, which may get the number of the listing
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                names.append(int(name))
    for number in names:
        with contextlib.suppress(OSError):  # closed meanwhile, or no connection
            one = socket.socket(fileno=os.dup(number))
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                one.getpeername()
                found.append(one)
    return found


def _sent(sockets: list[socket.socket]) -> int:
    """Returns how many bytes have gone out over them and been received."""
    infos = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for one in sockets]
    return sum(struct.unpack_from("Q", info, _BYTES_ACKED)[0] for info in infos)


def counted(dp: int, tp: int) -> tuple[int, int, float]:
    """Returns the connections of a WorldGroup, those it says it has, and the messages of one all_reduce."""
    dist.barrier()
    before = len(_connected())
    world = world_group(dp, tp)
    world.barrier()
    sockets = _connected()
    dist.barrier()
    start, payload = _sent(sockets), torch.zeros(1 << 18, dtype=torch.uint8)
    world.all_reduce(payload)
    dist.barrier()
    time.sleep(0.2)  # until what was received is acknowledged
    messages_sent = (_sent(sockets) - start) / payload.numel()
    dist.barrier()
    world.close()
    return len(sockets) - before, connections(world.topology), messages_sent


@pytest.mark.parametrize("dp, pp, tp", [(2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_connections_and_messages_are_those_of_the_formula(ranks8: RankPool, dp: int, pp: int, tp: int) -> None:
    found = ranks8.run(counted, dp * pp * tp, dp, tp)
    assert [there for there, _, _ in found] == [said for _, said, _ in found]
    assert round(sum(sent for _, _, sent in found), 1) == messages(dp, pp, tp)


def of_an_engine(dp: int, pp: int) -> tuple[int, int]:
    """Returns an engine's connections beside those of its trees, and theirs."""
    dist.barrier()
    before = len(_connected())
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    config = ParallelConfig(dp=dp, pp=pp, segments=1, schedule="1f1b", micro_batches=pp, dp_sync="early")
    make = functools.partial(torch.optim.SGD, lr=0.1)
    engine = Engine(Mean(model), config, optimizer=make, example={"x": torch.ones(1, 4)})
    engine.step({"x": torch.ones(pp, 4)})
    engine.flush()
    found = len(_connected()) - before
    dist.barrier()
    of_trees = connections(engine.topology)
    engine.close()
    return found - of_trees, of_trees


class Mean(nn.Module):
    """A loss of a chain of layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("pp", [1, 2])
def test_connections_of_an_engine_do_not_grow_with_the_replicas(ranks8: RankPool, pp: int) -> None:
    """Those of its trees are bounded (tests/comms/test_tree.py), all others are as many with 2 as with 4 replicas."""
    two, four = (ranks8.run(of_an_engine, dp * pp, dp, pp) for dp in (2, 4))
    assert {others for others, _ in two} == {others for others, _ in four} and len({o for o, _ in two}) == 1
    assert max(of_trees for _, of_trees in four) <= 4 * FAN_OUT


# How a wait ends


def waits(timeout: float, aborts_after: float | None) -> tuple[str, float]:
    """Rank 1 does not come to the second sum; returns what the others are told, and after how many seconds."""
    progress = Progress()
    group, rank = tree_group(4, timeout=timeout, progress=progress), dist.get_rank()
    group.all_reduce(torch.ones(1))
    start, told, spent = time.monotonic(), "", 0.0
    if rank != 1:
        if aborts_after is not None:
            threading.Timer(aborts_after, progress.life.fail, ["rank 1 failed"]).start()
        try:
            group.all_reduce(torch.ones(1))
        except dist.DistNetworkError as error:
            told = f"{type(error).__name__}: {error}"
        spent = time.monotonic() - start
    dist.barrier()  # whoever closes ends the waits of others
    if rank != 1:
        start = time.monotonic()
        group.close()
        spent += time.monotonic() - start
    dist.barrier()
    group.close()
    return told, spent


def first_to_be_connected() -> bool:
    """Returns whether member 0, which is late, had come back from gloo when this one's family was made."""
    store: Any = dist.distributed_c10d._get_default_store()

    def late(*args: Any) -> Any:
        group = connect_few(*args)
        time.sleep(0.3)  # what others would use to close theirs
        store.set("late member is connected", "yes")
        return group

    with mock.patch("fold3d.comms.tree_group.connect_few", late if dist.get_rank() == 0 else connect_few):
        made = Family(range(dist.get_world_size()), dist.get_rank(), "late", LIMIT)
    found = store.check(["late member is connected"])
    made.close()
    return bool(found)


def test_nobody_has_a_family_before_all_are_connected(ranks: RankPool) -> None:
    """gloo is done with one member while others are on their way; if that one closed, they would fail."""
    assert all(ranks.run(first_to_be_connected, 3))


def test_a_member_that_does_not_come_is_named(ranks: RankPool) -> None:
    (told, spent), _, (other, _) = ranks.run(waits, 3, 1.0, None)
    assert told.startswith("DistNetworkError: one of the ranks [1, 2] cannot be reached, or did not come within 1 s")
    assert spent < 5 and other


@pytest.mark.gate
def test_a_wait_ends_when_the_job_fails(ranks: RankPool) -> None:
    found = ranks.run(waits, 3, LIMIT, 0.3)
    for told, spent in (found[0], found[2]):
        assert told == "DistNetworkError: rank 1 failed"
        assert spent < 5, "neither the wait nor the group's own thread lasts until the time limit"
