"""Relay: brings data of any rank to rank 0, over the trees that all exchange values by."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fold3d.comms.world_group import WorldGroup


class Relay:
    """Of one rank. What a rank has goes up the tree of the replicas at its place, then up that of the stages of replica
    0 at its place on the axis tp, then up that of the shards of stage 0: a rank between keeps one piece of data while
    it leaves, and takes the next one meanwhile.

    All ranks that are on the way of some data call `bring` for it, and in the same order for all data.
    """

    def __init__(self, world: WorldGroup, timeout: float) -> None:
        """Args:
        timeout: seconds to wait for a rank.
        """
        self._world, self._timeout = world, timeout
        self._left: Callable[[], None] = lambda: None

    def is_on_way(self, source: int) -> bool:
        """Whether what rank `source` has comes by here, begins here, or ends here."""
        replica, stage, shard = self._world.topology.coordinates(source)
        mine = self._world.topology
        if (stage, shard) == (mine.pp_rank, mine.tp_rank):
            return self._world.data.is_above(replica)
        if not self._world.data.is_first:
            return False
        return self._world.pipeline.is_above(stage) if shard == mine.tp_rank else self._passes_shards(shard)

    def bring(self, data: Tensor, source: int) -> None:
        """Brings `data`, bytes in host memory, at least one, from rank `source` to rank 0, on which it has come when
        this returns. Other ranks on its way give room for it, which is in use until the next call or `end`.

        Raises: DistNetworkError when a rank is gone or does not come.
        """
        replica, stage, shard = self._world.topology.coordinates(source)
        mine, pipeline, tensor = self._world.topology, self._world.pipeline, self._world.tensor
        if (stage, shard) == (mine.pp_rank, mine.tp_rank):
            self._follow(self._world.data.pass_up(data, replica, timeout=self._timeout))
        if not self._world.data.is_first:
            return
        if shard == mine.tp_rank:
            self._follow(pipeline.pass_up(data, stage, timeout=self._timeout))
        if self._passes_shards(shard):
            self._follow(tensor.pass_up(data, shard, timeout=self._timeout))

    def end(self) -> None:
        """Waits until the last data has left."""
        left, self._left = self._left, lambda: None
        left()

    def _passes_shards(self, shard: int) -> bool:
        return self._world.pipeline.is_first and self._world.tensor.is_above(shard)

    def _follow(self, left: Callable[[], None]) -> None:
        before, self._left = self._left, left
        before()
