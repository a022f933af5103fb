"""What waits for DP.sync and what does not, on ranks whose streams tell when they are waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fold3d
from fold3d import _C, schedule
from fold3d.comms import connections
from fold3d.comms.groups import Groups
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.engine.planning import replanner
from fold3d.errors import Fold3dError
from fold3d.plan.job import TrainingJob
from fold3d.plan.proposal import Proposal
from fold3d.plan.search import search
from fold3d.plan.strategy import Constraints, Strategy
from fold3d.profile import layers as profile
from fold3d.topology import Topology
from tests.dist.dp_sync_loops import sgd

LAYERS, WIDTH, MICRO_BATCHES = 4, 6, 2
CLOSING_TIMEOUT = 40.0
"""Seconds (comm_timeout) that nobody may wait out when an engine is closed in the middle of a step."""
WAIT = 0.02
"""Seconds by which a wait for a gather is made longer."""


class Block(nn.Module):
    """A layer that can be cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class Net(nn.Module):
    """A chain of blocks; returns the mean square error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


class Watched:
    """DP.sync's streams of one rank; every gather is waited for, a little longer than needed."""

    def __init__(self, engine: fold3d.Engine) -> None:
        assert engine._rank is not None and isinstance(engine._rank.sync, DpSync)
        self._streams = engine._rank.sync._transfers._sync
        self.seen: list[str] = []
        engine._rank.sync._transfers._sync = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def is_gathered(self, bucket: int) -> bool:
        return False

    def wait_gathered(self, bucket: int) -> None:
        self._streams.wait_gathered(bucket)
        time.sleep(WAIT)
        self.seen.append(f"bucket {bucket}")


def engine_of(**settings: Any) -> fold3d.Engine:
    """Returns an engine with a bucket for each layer."""
    fixed: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "blocks": "layers", "bucket_bytes": 1}
    config = fold3d.ParallelConfig(**({"segments": 1, "schedule": "aiao"} | fixed | settings))
    return fold3d.Engine(Net().double(), config, optimizer=sgd, example=batch_of(0, 0))


def batch_of(step: int, replica: int) -> dict[str, Tensor]:
    """Returns a replica's batch."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    x = torch.randn(2 * MICRO_BATCHES, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.roll(1, 0)}


def alone(steps: int) -> dict[str, Tensor]:
    """Returns the weights after so many steps of two replicas in one process."""
    model = Net().double()
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(2):
            (model(**batch_of(step, replica)) / 2).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def step_of(engine: fold3d.Engine, number: int) -> float:
    """Runs a step; returns the loss."""
    return engine.step(batch_of(number, engine.topology.dp_rank)).loss.item()


def run_of(engine: fold3d.Engine, number: int) -> None:
    """Runs a step of a loop of one's own, up to the optimizer."""
    batch = batch_of(number, engine.topology.dp_rank)
    parts = [{name: tensor[2 * k : 2 * k + 2] for name, tensor in batch.items()} for k in range(MICRO_BATCHES)]
    engine.run(parts, lambda model, part: model(**part) / MICRO_BATCHES)


def order_of_waits(dp_sync: str) -> list[str]:
    """Returns in which order a step's forwards run and wait for the gathers of the step before."""
    engine = engine_of(dp=2, dp_sync=dp_sync)
    watched = Watched(engine)
    step_of(engine, 0)
    watched.seen.clear()
    for name, module in engine.model.named_modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda *_, name=name: watched.seen.append(name))
    step_of(engine, 1)
    names = {f"bucket {b.number}": b.names[0].rpartition(".")[0] for b in engine._rank.sync.buckets}  # type: ignore[union-attr]
    seen = [f"wait {names[event]}" if event in names else event for event in watched.seen]
    engine.close()  # waits for all gathers of the last step
    return seen


def gathered_before_the_vote() -> tuple[int, int]:
    """Returns how many buckets are gathered while no rank has begun the vote, and how many there are."""
    engine = engine_of(dp=2, pp=2, segments=2, dp_sync="early", comm_timeout=5)
    step_of(engine, 0)
    engine.flush()
    run_of(engine, 1)
    assert engine._rank is not None and isinstance(engine._rank.sync, DpSync)
    sync, known = engine._rank.sync, engine._rank.recorder.records
    gathered = {action for lane, action, _, _, _ in known if lane == "gather"}
    deadline = time.monotonic() + 5.0
    while len(gathered) < len(sync.buckets) and time.monotonic() < deadline:
        gathered |= {action for lane, action, _, _, _ in sync.take_records() if lane == "gather"}
        time.sleep(0.01)
    dist.barrier()  # a rank that goes on begins the vote
    engine.grad_norm()
    assert engine.optimizer is not None
    engine.optimizer.step()
    engine.close()
    return len(gathered), len(sync.buckets)


def _with_decay(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Reads all weights in front of the model's call."""
    decay = sum(parameter.square().sum() for parameter in model.parameters())
    return torch.as_tensor(model(**batch) + 1e-3 * decay)


def breakdowns(dp_sync: str) -> dict[str, tuple[float, float, int]]:
    """Returns by way of reading weights after a step: its exposed DP.sync, its length, and what the reader waited."""
    found = {}
    for way in ("nobody", "flush", "state_dict", "values", "loss"):
        engine = engine_of(dp=2, dp_sync=dp_sync)
        step_of(engine, 0)
        engine.flush()
        watched, parameters = Watched(engine), list(engine.model.parameters())
        if way == "loss":
            step_of(engine, 1)
            watched.seen.clear()
            engine.run([batch_of(2, engine.topology.dp_rank)], _with_decay)
        else:
            step_of(engine, 1)
            watched.seen.clear()
            if way == "flush":
                engine.flush()
            elif way == "state_dict":
                engine.model.state_dict()
            elif way == "values":
                assert all(not one.isnan().any() for one in parameters)
        waited = len(watched.seen)
        breakdown = engine.breakdown()
        found[way] = (breakdown.exposed_dp_ms, breakdown.step_ms, waited)
        engine.flush()
        engine.close()
    return found


def arbiters(hosts: list[str]) -> tuple[list[str], list[str]]:
    """Returns the shared memory that this rank has in use when ranks are on these hosts, and the names left over."""
    topology = Topology(dp=dist.get_world_size(), pp=1, rank=dist.get_rank())
    groups = Groups(topology, torch.device("cpu"), 20.0, (), with_p2p=False)
    before, known = connections.host_identity, _shared_memory()
    connections.host_identity = lambda: hosts[topology.rank]
    try:
        arbiter = connections.join_nic_arbiter(topology, groups, "job", True)
        found = sorted(_shared_memory() - known)
    finally:
        connections.host_identity = before
    left = [name for name in found if Path("/dev/shm", name).exists()]
    dist.barrier()
    del arbiter
    groups.close()
    return found, left


def traffic_of_an_engine(hosts: str) -> tuple[int, list[str]]:
    """Returns how many messages of a step this rank told its host's arbiter of, and its shared memory."""
    known, before = _shared_memory(), connections.host_identity
    connections.host_identity = lambda: hosts[dist.get_rank()]
    try:
        engine = engine_of(dp=2, pp=2, segments=2)
    finally:
        connections.host_identity = before
    found = sorted(_shared_memory() - known)
    step_of(engine, 0)
    assert engine._rank is not None
    messages = engine._rank.recorder._arbiter.counters()["messages"]
    engine.close()
    return messages, found


def simulated_messages(hosts: str) -> list[bool]:
    """Returns which ranks send messages through a card of theirs when the same step is simulated."""
    order = schedule.generate("aiao", pp=2, segments=2, micro_batches=MICRO_BATCHES)
    model = _C.ClusterModel()
    model.dp, model.hosts, model.bandwidth = 2, [hosts.index(host) for host in hosts], 1e9
    model.forward_ns = model.backward_ns = model.activation_bytes = model.gradient_bytes = [1000] * 4
    model.layers = [1] * 4
    step = _C.simulate_step(order, model)
    replicas = len(hosts) // len(step.ranks)  # those that do the same are simulated once
    return [rank.pp_bytes > 0 for rank in step.ranks] * replicas


def broken_gate() -> list[str]:
    """Returns what is left of the arbiter's shared memory when ranks fail while they join it."""
    known = set(Path("/dev/shm").iterdir())
    topology = Topology(dp=2, pp=1, rank=dist.get_rank())
    groups = Groups(topology, torch.device("cpu"), 20.0, (), with_p2p=False)
    groups.world.barrier = _raise  # type: ignore[method-assign]
    with contextlib.suppress(ConnectionError):
        connections.join_nic_arbiter(topology, groups, "job", True)
    dist.barrier()
    groups.close()
    return [path.name for path in set(Path("/dev/shm").glob("fold3d-*")) - known]


def _raise(*_: Any, **__: Any) -> None:
    raise ConnectionError("a rank is gone")


def _shared_memory() -> set[str]:
    """Returns what this process has mapped, by arbiters of engines that nobody has collected yet, too."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split("/")[-1].split()[0] for line in lines if "/fold3d-" in line}


def error_of(call: Callable[[], object]) -> str:
    """Returns what `call` raises."""
    try:
        call()
    except Fold3dError as error:
        return str(error)
    return ""


def another_schedule() -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Trains through a look of the replanner that finds a better schedule; returns losses, weights, and the plan."""
    real, asked = replanner.recheck, []

    def better(job: TrainingJob, strategy: Strategy, *measured: Any) -> Proposal | None:
        other = "aiao" if strategy.schedule != "aiao" else "1f1b" if strategy.segments == 1 else "interleaved"
        asked.append(other)
        kept = {"ranges": strategy.ranges, "bucket_bytes": strategy.bucket_bytes, "dp_sync": strategy.dp_sync}
        return search(job, Constraints(schedule=other, modes=strategy.modes or None, **kept))

    replanner.recheck = better
    try:
        engine = engine_of(dp=2, pp=2, segments="auto", schedule="auto", bucket_bytes=None)
        losses = [step_of(engine, step) for step in range(6)]
    finally:
        replanner.recheck = real
    engine.flush()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, asked)
    seen = {
        "asked": [other for one in told for other in one],
        "schedule": engine.strategy.schedule,
        "strategy": str(engine.strategy),
        "csv": engine.programs.compute(MICRO_BATCHES).csv(),
    }
    weights = {name: p.detach().clone() for name, p in engine.owned.items()}
    engine.close()
    return losses, weights, seen


def close_in_the_backward() -> tuple[str, float]:
    """Returns how a step ends in whose first backward this rank's engine is closed, and the seconds that takes."""
    engine = engine_of(dp=2, pp=2, segments=2, dp_sync="early", comm_timeout=CLOSING_TIMEOUT)
    for number in range(2):
        step_of(engine, number)
    if dist.get_rank() == 0:
        next(iter(engine.owned.values())).register_hook(lambda _: engine.close())
    start = time.monotonic()
    return error_of(lambda: step_of(engine, 2)), time.monotonic() - start


def norm_of_nothing() -> float:
    """Returns the gradient norm before the first step."""
    engine = engine_of(dp=2, dp_sync="zero1")
    found = engine.grad_norm().item()
    engine.close()
    return found


def thawed() -> list[str]:
    """Returns the names with optimizer state after a state was loaded into an engine that trains less."""
    engine = engine_of(dp=2, dp_sync="early")
    step_of(engine, 0)
    state = engine.state_dict()
    engine.close()
    model = Net().double()
    model.layers[0].requires_grad_(False)
    config = fold3d.ParallelConfig(dp=2, segments=1, micro_batches=MICRO_BATCHES, blocks="layers", dp_sync="early")
    engine = fold3d.Engine(model, config, optimizer=sgd, example=batch_of(0, 0))
    engine.load_state_dict(state)
    assert engine.optimizer is not None
    engine.optimizer.state_dict()  # finds every parameter with state in a group
    names = [name for name, parameter in engine.owned.items() if engine.optimizer.state.get(parameter)]
    step_of(engine, 1)
    engine.close()
    return names


def timed_under() -> list[Any]:
    """Returns the kinds of numbers that a bf16 job's layers are timed with."""
    real, seen = profile.time_call, []

    def time_call(*args: Any, autocast: Any, **named: Any) -> Any:
        with autocast():
            seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return real(*args, autocast=autocast, **named)

    profile.time_call = time_call
    try:
        config = fold3d.ParallelConfig(dp=2, micro_batches=2, blocks="layers")
        engine = fold3d.Engine(
            Net(),
            config,
            example={name: tensor.float() for name, tensor in batch_of(0, 0).items()},
            autocast=partial(torch.autocast, "cpu", torch.bfloat16),
        )
        engine.close()
    finally:
        profile.time_call = real
    return seen
