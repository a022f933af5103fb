"""Consensus: what fails on one rank fails on every rank, at the same point, with the same reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fold3d.errors import CheckpointError


@contextmanager
def together(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Runs the body and meets the other ranks at its end; raises on all of them when the body raised on one.

    Args:
        what: what is being done, for the message, e.g. "saving checkpoint-100".
        group: the ranks that run this block, all of them must; None in a job of one process.
    Raises: the rank's own exception where the body raised, CheckpointError naming that rank elsewhere.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:  # held back until the others have arrived: they would wait for this rank
        error = failure
    texts = [f"{type(error).__name__}: {error}" if error is not None else ""]
    if group is not None and dist.get_world_size(group) > 1:
        own = texts[0]
        texts = [""] * dist.get_world_size(group)
        dist.all_gather_object(texts, own, group=group)
    if error is not None:
        raise error
    for member, text in enumerate(texts):
        if text:
            rank = dist.get_global_rank(group, member) if group is not None else member
            raise CheckpointError(f"{what} failed on rank {rank}: {text}")
