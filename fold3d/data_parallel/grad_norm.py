"""all_reduce_norm(): the one exchange of a step over all ranks, between the sums of gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fold3d.comms.world_group import WorldGroup
from fold3d.data_parallel.gradients import sum_of_squares


def all_reduce_norm(counts: Sequence[int], shards: Sequence[Tensor], world: WorldGroup) -> tuple[list[int], Tensor]:
    """Returns the sums of `counts` over all ranks, and the L2 norm of everybody's `shards`; all ranks of the job call.

    The norm is fp64, in host memory, and the same bits on every rank; it is infinite or no number where any gradient of
    any rank is. Squares are summed in fp64: on a rank in the order of `shards`, then in that of `WorldGroup`.

    Args:
        counts: this rank's, as many as every rank's.
        shards: gradients that no other rank brings, any shapes.
    """
    mine = torch.cat([torch.tensor(counts, dtype=torch.float64), sum_of_squares(shards).reshape(1)])
    world.all_reduce(mine)
    return [int(count) for count in mine[:-1]], mine[-1].sqrt()
