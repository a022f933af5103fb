"""Consensus: what fails on one rank fails on every rank, at the same point, with the same reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fold3d.errors import CheckpointError


@contextmanager
def together(what: str, group: dist.ProcessGroup | None, patience: float) -> Iterator[None]:
    """Runs the body and meets the other ranks at its end; raises on all of them when the body raised on one.

    Args:
        what: what is being done, for the message, e.g. "saving checkpoint-100".
        group: the ranks that run this block, all of them must; None in a job of one process.
        patience: seconds to wait for the others, who may be writing a large model; the group's own time limit, which
            is for steps, does not count here.
    Raises: the rank's own exception where the body raised, CheckpointError naming that rank elsewhere.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:  # held back until the others have arrived: they would wait for this rank
        error = failure
    if group is not None and _failures(error, group, patience):
        texts = [""] * dist.get_world_size(group)
        own = f"{type(error).__name__}: {error}" if error is not None else ""
        dist.all_gather_object(texts, own, group=group)
        if error is None:
            member, text = next((member, text) for member, text in enumerate(texts) if text)
            raise CheckpointError(f"{what} failed on rank {dist.get_global_rank(group, member)}: {text}")
    if error is not None:
        raise error


def _failures(error: Exception | None, group: dist.ProcessGroup, patience: float) -> bool:
    """Returns whether the body raised on any rank, once all ranks are here."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=patience)
    work = group.allreduce([failed], options)
    work.wait()
    return bool(failed.item())
