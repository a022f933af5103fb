"""Who watches the ranks of a job from the moment that they know each other: a Supervisor, later the first engine's."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fold3d.faults.supervisor import Supervisor
from fold3d.topology import Topology

# By the job's default process group, whose end is theirs.
_waiting: WeakKeyDictionary[Any, Supervisor] = WeakKeyDictionary()
_numbers: WeakKeyDictionary[Any, itertools.count[int]] = WeakKeyDictionary()


def watch_job(topology: Topology, timeout: float) -> None:
    """From now on this rank is watched, and hears which other one is silent; all ranks call, and none waits.

    Does nothing the second time in a job, and in one of a single rank.

    Args:
        timeout: seconds without a sign of life after which a rank has failed.
    """
    if topology.world == 1 or not dist.is_initialized():
        return
    job = dist.distributed_c10d._get_default_group()
    if job not in _numbers:
        _numbers[job] = itertools.count()
        _waiting[job] = _watching(job, topology, timeout)


def supervisor_of_engine(topology: Topology, timeout: float) -> Supervisor:
    """Returns the one that has watched the job so far, for its first engine; later ones get one of their own.

    All ranks call in the same order, and none waits. Args as for `watch_job`.
    """
    if topology.world == 1 or not dist.is_initialized():
        return Supervisor(topology)
    watch_job(topology, timeout)
    job = dist.distributed_c10d._get_default_group()
    found = _waiting.pop(job, None)
    if found is None:
        return _watching(job, topology, timeout)
    found.expect(topology, timeout)
    return found


def _watching(job: Any, topology: Topology, timeout: float) -> Supervisor:
    made = Supervisor(topology)
    made.watch(dist.distributed_c10d._get_default_store(), f"watch {next(_numbers[job])}", timeout)
    return made
