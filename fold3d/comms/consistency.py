"""Agreement: what must be the same on every rank before any group is made, and on every stage in every step."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fold3d.comms.world_group import WorldGroup
from fold3d.errors import ConfigError, Fold3dError, RankError
from fold3d.topology import Topology

_SAMPLE = 1024
_NAMED = 8
"""How many ranks a message names."""


def agree(world: WorldGroup, digest: str, number: int, error: Exception | None) -> int:
    """Meets all ranks of the job after each has made its plan; returns rank 0's `number`.

    Args:
        digest: hash of this rank's plan, "" when it has none.
        number: anything the ranks shall have in common.
        error: why this rank has no plan.
    Raises: `error` itself; RankError when another rank has no plan; ConfigError when the plans differ.
    """
    topology = world.topology

    def verdict(shares: list[tuple[str, int, str]]) -> int:
        failed = [(rank, text) for rank, (_, _, text) in enumerate(shares) if text]
        if failed:
            rank, text = failed[0]
            raise RankError(f"{topology.describe(rank)} failed in building the engine: {text}")
        digests = [share[0] for share in shares]
        different = [rank for rank in range(topology.world) if digests[rank] != digests[0]]
        if different:
            named = different[:_NAMED] + (["..."] if len(different) > _NAMED else [])
            hashes = [digests[rank] for rank in [0, *different[:_NAMED]]]
            raise ConfigError(
                f"ranks {named} have another plan than rank 0 (hashes {hashes}); start every process with the same "
                "script, arguments and library versions"
            )
        return shares[0][1]

    text = "" if error is None else f"{type(error).__name__}: {error}"
    try:
        return world.decide((digest, number, text), verdict, timeout=world.patience)
    except Fold3dError:
        if error is not None:
            raise error from None
        raise
    except dist.DistError as lost:
        rank = topology.describe(topology.rank)
        raise RankError(f"{rank} met nobody in building the engine: {lost}") from (error or lost)


@contextlib.contextmanager
def all_or_none(world: WorldGroup) -> Iterator[None]:
    """All ranks of the job run the body, then meet. Raises: what it raised; RankError where it did on another rank."""
    error: Exception | None = None
    try:
        yield
    except Exception as own:
        error = own
    agree(world, "", 0, error)


def samples_of_values(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns a sample of at most 1024 values of each tensor, copied, by its name, shape and dtype."""
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
