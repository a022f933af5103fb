"""Groups: the process groups of one rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from fold3d.comms.shared_gloo import new_group
from fold3d.comms.tree_group import TreeGroup
from fold3d.comms.world_group import WorldGroup
from fold3d.device import is_accelerator
from fold3d.errors import ConfigError
from fold3d.topology import Submesh, Topology, V

QUEUES = ("send_forward", "recv_forward", "send_backward", "recv_backward")
"""Of one rank: messages of one kind, one after the other."""
AGAINST = "_against"
"""Ends the name of a queue's group against its usual way, which is forward to the next stage, backward to the one
before. Segments that run back send so."""


def place_in_job() -> tuple[int, int]:
    """Returns this process's rank and the number of processes.

    Raises: ConfigError where it was started as one of several and nobody has connected them: each would train a model
        of its own.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"this process was started as one of {os.environ['WORLD_SIZE']} (WORLD_SIZE), and torch.distributed is not "
            "initialised: call torch.distributed.init_process_group() before you make the Engine"
        )
    return 0, 1


class Groups:
    """Process groups of one rank; every rank of the job must construct it at the same point.

    `p2p` carries activations and gradients, by queue: a group per link and direction, so that none queues behind
    another. `rings` sum gradients over the replicas of a stage and gather them; with tensor parallelism they, and
    links, join ranks of one place on the axis tp. `tensor` is the tensor-parallel group of this rank's stage in its
    replica, `ties` for parameters that several ranks of a replica hold, by the places that do. On an accelerator these
    have gloo for host memory (message headers) and the accelerator's library (NCCL) for its own, but rings only the
    library: in a gloo group every rank is connected with every other, so none is over replicas or stages where
    gradients need none. What these, and all ranks, tell each other goes over the trees of `world`, and what of that
    lies on an accelerator, as the gradient norm does, by its library in groups of the same ranks. Each group of `p2p`
    and `rings` has a thread of gloo, the other groups one together. Without `with_p2p` activations and gradients go
    elsewhere and have no groups.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        timeout: float,
        ties: Iterable[Submesh],
        *,
        with_p2p: bool = True,
        world: WorldGroup | None = None,
    ):
        """Args:
        timeout: seconds that a rank may take to come.
        world: that of the job, which stays when these groups are closed; None: makes one.
        """
        self.topology = topology
        self._timeout = timedelta(seconds=timeout)
        self.device = device
        self._made: list[Any] = []
        replicas, lanes = range(topology.dp), range(topology.tp)
        pipelines = [topology.pipeline(replica, tp) for replica in replicas for tp in lanes]
        stages = [topology.replicas(stage, tp) for stage in range(topology.pp) for tp in lanes]
        self.tensor = self._own([topology.shards(r, stage) for r in replicas for stage in range(topology.pp)])
        self.p2p: dict[str, Any] = dict.fromkeys(QUEUES)
        if with_p2p:
            self._make_lines(pipelines)
        self._own_world = world is None
        self.world = WorldGroup(topology, timeout) if world is None else world
        self.rings: dict[str, Any] = {
            name: self._own(stages if with_p2p else [], own_thread=True, device_only=is_accelerator(device))
            for name in ("reduce", "gather")
        }
        if is_accelerator(device):
            self.data.use_library(self._own(stages, device_only=True))
            self.world.pipeline.use_library(self._own(pipelines, device_only=True))
            self.world.tensor.use_library(self.tensor)
        self.ties: dict[Submesh, Any] = {
            places: self._own([topology.ranks_of(places, replica) for replica in range(topology.dp)])
            for places in sorted(set(ties))
        }

    @property
    def data(self) -> TreeGroup:
        """The replicas of this rank's stage and shard."""
        return self.world.data

    def mean_over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the mean of a tensor, the same on all replicas of this rank's stage and shard, which call."""
        mean = value.detach().clone()
        self.data.all_reduce(mean)
        return mean / self.topology.dp

    def _own(
        self,
        rank_lists: list[list[int]],
        *,
        own_thread: bool = False,
        device_only: bool = False,
        urgent: bool = False,
    ) -> Any:
        """Makes one group per list, on every rank in the same order; returns the one this rank is in, None if alone."""
        own = None
        for ranks in rank_lists:
            if len(ranks) < 2:
                continue
            gloo = not device_only
            group = new_group(ranks, self._timeout, self.device, gloo=gloo, own_thread=own_thread, urgent=urgent)
            if group is not None:
                own = group
                self._made.append(group)
        return own

    def _make_lines(self, pipelines: list[list[int]]) -> None:
        """Makes the groups by which this rank's four queues send and receive."""
        pp, stage = self.topology.pp, self.topology.pp_rank
        ways = ("", AGAINST) if self.topology.style == V and pp > 2 else ("",)
        for direction, way in product(("forward", "backward"), ways):
            # A library does what one communicator is told one after the other: with both directions, or two links, in
            # one, ranks could wait for each other in a circle. So for each link one, of two ranks.
            ends = [[_link(pipeline, near) for pipeline in pipelines] for near in range(pp)]
            links = [self._own(ranks, own_thread=True, urgent=True) for ranks in ends]
            after, before = links[stage], links[stage - 1]
            out, into = (after, before) if (direction == "forward") == (way == "") else (before, after)
            self.p2p |= {f"send_{direction}{way}": out, f"recv_{direction}{way}": into}

    def p2p_names(self) -> dict[str, str]:
        """Returns the names under which C++ finds the groups of `p2p`; empty where there is nobody to talk to."""
        return _names(self.p2p)

    def ring_names(self) -> dict[str, str]:
        """Returns the names under which C++ finds the rings."""
        return _names(self.rings)

    def abort(self, reason: str) -> None:
        """The job has failed: ends kernels of the accelerator's library which wait for a rank that is gone; any thread.

        What waits in host memory hears of the failure by itself.
        """
        for group in list(self._made) if is_accelerator(self.device) else ():
            with contextlib.suppress(RuntimeError):  # it has ended them already, or cannot: its own time limit does
                group.abort()

    def close(self) -> None:
        """Destroys this rank's groups; the default group stays, and the world it was given."""
        for tree in (self.world.data, self.world.pipeline, self.world.tensor):
            tree.use_library(None)
        for group in self._made:
            with contextlib.suppress(ValueError):  # the user destroyed all groups, and perhaps made others since
                if dist.is_initialized():
                    dist.destroy_process_group(group)
        self._made.clear()
        if self._own_world:
            self.world.close()


def _link(pipeline: list[int], near: int) -> list[int]:
    """Returns the ranks of stage `near` and of the one after it, which is the first after the last."""
    return sorted({pipeline[near], pipeline[(near + 1) % len(pipeline)]})


def _names(groups: dict[str, Any]) -> dict[str, str]:
    return {name: group.group_name if group is not None else "" for name, group in groups.items()}
