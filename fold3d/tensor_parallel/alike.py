"""make_alike(): the same values on all members of a group, moving only what differs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from torch import Tensor

from fold3d.comms.family import as_bytes
from fold3d.comms.tree_group import TreeGroup
from fold3d.errors import ConfigError


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
