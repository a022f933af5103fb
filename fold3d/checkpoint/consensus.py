"""Consensus: what fails on one rank fails on every rank, at the same point, with the same reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fold3d.comms.world_group import WorldGroup
from fold3d.errors import CheckpointError


@contextmanager
def together(what: str, world: WorldGroup, patience: float) -> Iterator[None]:
    """Runs the body and meets the other ranks at its end; raises on all of them when the body raised on one.

    Args:
        what: what is being done, for the message, e.g. "saving checkpoint-100".
        world: the ranks that run this block, all of them must.
        patience: seconds to wait for the others, who may be writing a large model; the time limit of steps does not
            count here.
    Raises: the rank's own exception where the body raised, CheckpointError naming that rank elsewhere.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:  # held back until the others have arrived: they would wait for this rank
        error = failure
    failed = torch.tensor([error is not None])
    world.all_reduce(failed, torch.logical_or, timeout=patience)
    if failed:
        text = f"{type(error).__name__}: {error}" if error is not None else ""
        rank, first = world.decide(text, _first, timeout=patience)
        if error is None:
            raise CheckpointError(f"{what} failed on rank {rank}: {first}")
    if error is not None:
        raise error


def _first(texts: list[str]) -> tuple[int, str]:
    return next((rank, text) for rank, text in enumerate(texts) if text)
