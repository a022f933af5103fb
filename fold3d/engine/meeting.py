"""meet(): all ranks come to the same call, or all of them are told which one did not."""

from __future__ import annotations

import torch.distributed as dist

from fold3d.comms.world_group import WorldGroup
from fold3d.errors import Fold3dError, RankError
from fold3d.faults.failure import is_communication_error


class AbsentError(Fold3dError, dist.DistNetworkError):
    """Not all ranks came."""


def meet(world: WorldGroup, call: str, timeout: float) -> None:
    """Waits until every rank has come to the same `call`, such as "trainer.save_model()".

    Args:
        timeout: seconds to wait.
    Raises: RankError when ranks come to different calls, AbsentError when not all of them come.
    """
    try:
        world.decide(call, _same_call, timeout=timeout)
    except RankError:
        raise
    except Exception as error:
        if not is_communication_error(error):
            raise
        why = str(error).partition(" (gloo")[0]
        raise AbsentError(f"every process must call {call}, and not all of them did: {why}") from None


def _same_call(calls: list[str]) -> None:
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        raise RankError(f"every process must call {calls[0]}, but rank {other} calls {calls[other]}")
