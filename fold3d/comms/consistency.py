"""Agreement: what must be the same on every rank before any group is made, and on every stage in every step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fold3d.comms.tree_group import TreeGroup, as_bytes
from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError, ConfigError, Fold3dError, RankError
from fold3d.topology import Topology

_SAMPLE = 1024
_NAMED = 8
"""How many ranks a message names."""
_SHOWN = 160
"""How many letters of a value."""


def agree(world: WorldGroup, number: int, error: Exception | None) -> int:
    """Meets all ranks of the job after each has made its plan; returns rank 0's `number`.

    Args:
        number: anything the ranks shall have in common.
        error: why this rank has no plan.
    Raises: `error` itself; RankError when another rank has no plan.
    """
    topology = world.topology

    def verdict(shares: list[tuple[int, str]]) -> int:
        failed = [(rank, text) for rank, (_, text) in enumerate(shares) if text]
        if failed:
            rank, text = failed[0]
            raise RankError(f"{topology.describe(rank)} failed in building the engine: {text}")
        return shares[0][0]

    text = "" if error is None else f"{type(error).__name__}: {error}"
    try:
        return world.decide((number, text), verdict, timeout=world.patience)
    except Fold3dError:
        if error is not None:
            raise error from None
        raise
    except dist.DistError as lost:
        rank = topology.describe(topology.rank)
        raise RankError(f"{rank} met nobody in building the engine: {lost}") from (error or lost)


Shared = Mapping[str, str]
"""What something is called -> what it is, in words or as a number."""


def compare(world: WorldGroup, of_all: Shared, of_place: Shared = MappingProxyType({})) -> str:
    """Compares what ranks must have in common; returns a short hash of `of_all`. All ranks of the job call.

    They exchange a hash each; what it is of is sent where there is a difference.

    Args:
        of_all: the same on every rank.
        of_place: the same on all replicas of this rank's stage and shard.
    Raises: ConfigError on every rank, which names what is different, on which ranks, and the values.
    """
    topology = world.topology
    mine = _hash(of_all), _hash(of_place)

    def is_odd(hashes: list[tuple[str, str]]) -> bool:
        first = [hashes[rank][1] for rank in topology.replica(0)]
        return any(whole != hashes[0][0] for whole, _ in hashes) or any(
            own != first[rank % len(first)] for rank, (_, own) in enumerate(hashes)
        )

    if topology.world > 1 and world.decide(mine, is_odd, timeout=world.patience):
        first = world.share(dict(of_all), timeout=world.patience)
        of_first = world.data.share(dict(of_place), timeout=world.patience)
        rank, of_replica = topology.rank, topology.replica(0)
        mine_odd = [
            *_difference(0, first, of_all),
            *_difference(of_replica[rank % len(of_replica)], of_first, of_place),
        ]
        world.decide(mine_odd, _refuse, timeout=world.patience)
    return mine[0]


def _hash(shared: Shared) -> str:
    return hashlib.sha256(json.dumps(sorted(shared.items())).encode()).hexdigest()[:16]


_Difference = tuple[str, int, str, str]
"""What is different, from which rank's, that one's value and this rank's."""


def _difference(rank: int, first: Shared, mine: Shared) -> Iterator[_Difference]:
    """Yields the first thing, if any, that is different from rank `rank`'s."""
    for name in dict.fromkeys((*first, *mine)):
        theirs, own = first.get(name, "nothing"), mine.get(name, "nothing")
        if theirs != own:
            place = next((i for i, (a, b) in enumerate(zip(theirs, own, strict=False)) if a != b), 0)
            lo = max(0, place - _SHOWN // 2)
            yield name, rank, theirs[lo : lo + _SHOWN], own[lo : lo + _SHOWN]
            return


def _refuse(found: list[list[_Difference]]) -> None:
    odd = [(rank, one) for rank, differences in enumerate(found) for one in differences]
    name, first, theirs, _ = odd[0][1]
    others = [(rank, own) for rank, (what, of, _, own) in odd if (what, of) == (name, first)]
    named: list[int | str] = [rank for rank, _ in others[:_NAMED]]
    values = ", ".join(f"{own} on rank {rank}" for rank, own in others[:_NAMED])
    raise ConfigError(
        f"ranks {named + ['...'] * (len(others) > _NAMED)} have another {name} than rank {first}: {values}, and "
        f"{theirs} there; start every process with the same script, arguments and library versions"
    )


@contextlib.contextmanager
def all_or_none(world: WorldGroup) -> Iterator[None]:
    """All ranks of the job run the body, then meet. Raises: what it raised; RankError where it did on another rank."""
    error: Exception | None = None
    try:
        yield
    except Exception as own:
        error = own
    agree(world, 0, error)


@contextlib.contextmanager
def together(what: str, world: WorldGroup, patience: float) -> Iterator[None]:
    """Runs the body and meets the other ranks at its end; raises on all of them when the body raised on one.

    Args:
        what: what is being done, for the message, e.g. "saving checkpoint-100".
        world: the ranks that run this block, all of them must.
        patience: seconds to wait for the others, who may be writing a large model; the time limit of steps does not
            count here.
    Raises: the rank's own exception where the body raised, CheckpointError naming that rank elsewhere.
    """
    text = ""
    error: Exception | None = None
    try:
        yield
    except Exception as own:  # held back until the others have arrived: they would wait for this rank
        text, error = f"{type(own).__name__}: {own}", own
    first = world.decide(
        text, lambda texts: next(((k, one) for k, one in enumerate(texts) if one), None), timeout=patience
    )
    if error is not None:
        raise error
    if first is not None:
        raise CheckpointError(f"{what} failed on rank {first[0]}: {first[1]}")


def samples_of_values(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns a sample of at most 1024 values of each tensor, copied, by its name, shape and dtype."""
    with torch._C.DisableTorchFunctionSubclass():  # one that knows whether it is used is not
        return {
            f"{name}{tuple(one.shape)}{one.dtype}": _sample(one).clone()
            for name, one in values.items()
            if isinstance(one, torch.Tensor) and one.layout == torch.strided and one.numel()
        }


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLE)].contiguous()


def fingerprint(micro_batches: Sequence[Mapping[str, Any]]) -> int:
    """Returns a number below 2**32 that differs, almost surely, between different micro-batches.

    Names, shapes, dtypes and a sample of at most 1024 values per tensor: microseconds, whatever the size. The samples
    of tensors on a device are reduced to one number there, so that the host waits once. Values that are no tensors
    are left out.
    """
    code = len(micro_batches)
    samples: list[torch.Tensor] = []
    for batch in micro_batches:
        for name in sorted(batch):
            tensor = batch[name]
            if not isinstance(tensor, torch.Tensor):
                continue
            code = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), code)
            if tensor.layout != torch.strided or not tensor.numel():
                continue
            sample = _sample(tensor).view(torch.uint8)
            if _is_in_host_memory(tensor):
                code = zlib.crc32(sample.numpy().tobytes(), code)
            elif tensor.device.type != "meta":
                samples.append(sample)
    if samples:
        code = zlib.crc32(hashed(samples).cpu().numpy().tobytes(), code)
    return code


def _is_in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def hashed(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns one int64 that differs, almost surely, between different bytes, on their device and without waiting.

    Each byte is weighed by a number that depends on its place, and the sum wraps around.

    Args:
        samples: uint8, on one device, in order.
    """
    data = torch.cat([sample.reshape(-1) for sample in samples]).to(torch.int64) + 1
    place = torch.arange(1, data.numel() + 1, device=data.device)
    weight = place * 0x5851F42D4C957F2D  # Knuth's multiplier; products wrap, which is what mixes the bits
    return (data * (weight ^ (weight >> 29))).sum()


def check_same_batch(topology: Topology, ranks: Sequence[int], fingerprints: Sequence[int]) -> None:
    """Raises ValueError unless all `ranks`, of this rank's replica, were given the same batch.

    Args:
        fingerprints: one per rank.
    """
    codes = zip(ranks, fingerprints, strict=True)
    odd = [topology.coordinates(rank) for rank, code in codes if code != fingerprints[0]]
    if odd:
        stages = f"the stages {[at.pp for at in odd]} of replica {topology.dp_rank}"
        shards = f"the (stage, shard) {[(at.pp, at.tp) for at in odd]} of replica {topology.dp_rank}"
        who, first = (stages, "its stage 0") if topology.tp == 1 else (shards, f"rank {ranks[0]}")
        raise ValueError(
            f"{who} were given another batch than {first}, or called the model with other values; all processes of a "
            "replica must get the same batches in the same order: shard the data by engine.topology.dp_rank, not by "
            "rank, and seed the data loaders alike. What a loss function computes before the model's call must not "
            "depend on what it has drawn or counted behind it, where only the model's last stage goes on"
        )


def make_alike(tensors: Mapping[str, Tensor], group: TreeGroup, *, timeout: float) -> None:
    """Gives all members the first one's values of those tensors that differ, in place; all members call.

    Values are compared by their checksums.

    Args:
        tensors: by name, in an order that is the same on all members; none on the meta device.
        timeout: seconds that a member may take to come.
    Raises: ConfigError on all of them when names, shapes or dtypes differ.
    """
    if group.size == 1:
        return
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    sums = [zlib.crc32(as_bytes(tensor).cpu().numpy().data) for tensor in tensors.values()]
    shares = group.gather((described, sums), timeout=timeout)
    found: list[str] | tuple[str, int] = []
    if shares is not None:
        odd = next((member for member, share in enumerate(shares) if share[0] != described), None)
        if odd is None:
            columns = zip(tensors, zip(*(share[1] for share in shares), strict=True), strict=True)
            found = [name for name, values in columns if len(set(values)) > 1]
        else:
            differing = set(described) ^ set(shares[odd][0])
            found = min((name for name, _, _ in differing), default="the order of names"), group.ranks[odd]
    found = group.share(found, timeout=timeout)
    if isinstance(found, tuple):
        raise ConfigError(
            f"rank {found[1]} has another model than rank {group.ranks[0]} ({found[0]} differs), but they share its "
            "weights; build the same model in every process"
        )
    for name in found:
        group.broadcast(tensors[name], timeout=timeout)
