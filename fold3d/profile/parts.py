"""Parts: of which tensors a rank of a tensor-parallel group has a part only, found by following a whole model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

from fold3d.sharding.plan import ShardingPlan

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution")
"""What sums over a dimension: of two parts it makes a sum over the ranks, which is whole."""
_LOOKUP = "embedding"


class Parts:
    """What operations make of parts of weights: a product of a whole tensor with a part is a part, and of two parts a
    sum, which TP.sync makes whole. What is computed of a part is a part.

    Where ranks share the sequence, blocks have parts of what is whole otherwise; whole are the inputs of products with
    parts, which are gathered for them.
    """

    def __init__(self, model: Module, sharding: ShardingPlan | None) -> None:
        """Args:
        model: the one that runs, whole.
        sharding: None: every tensor is whole.
        """
        self._tp = 1 if sharding is None else sharding.tp
        self._shares_sequence = sharding is not None and bool(sharding.sequence)
        self._weights: dict[int, int] = {}  # storage -> the dimension along which it is spread
        self._parts: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            shard = None if sharding is None else sharding.shard_of(name)
            if shard is not None and all(shard.length(rank) < shard.size for rank in range(shard.ranks)):
                self._weights[_key(parameter)] = shard.dim

    def bytes_of(self, name: str, operands: Sequence[Tensor], key: int, size: int, in_block: bool) -> int:
        """Returns how many bytes of a new storage a rank has.

        Args:
            name: of the operation that made it.
            operands: its tensors.
            key, size: of the storage, whole.
            in_block: whether a block is under way, or its backward.
        """
        if self._tp == 1:
            return size
        keys = {_key(tensor) for tensor in operands}
        weights = keys & self._weights.keys()
        if weights and weights == keys:  # of another dtype, say
            self._weights[key] = self._weights[next(iter(weights))]
            return size // self._tp
        is_part = bool(keys & self._parts)
        if name == _LOOKUP and weights:
            is_part = self._weights[next(iter(weights))] != 0  # else the ranks' entries are summed
        elif weights:
            is_part = not (is_part and name in _PRODUCTS)
        if is_part:
            self._parts.add(key)
        else:
            self._parts.discard(key)  # of a storage that has gone
        return size // self._tp if is_part or (in_block and self._shares_sequence) else size

    def gathered(self, name: str, operands: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Returns the storages that ranks gather for this operation, where they share the sequence; and their bytes."""
        if not self._shares_sequence or name not in _PRODUCTS:
            return []
        if not self._weights.keys() & {_key(tensor) for tensor in operands}:
            return []
        others = [tensor for tensor in operands if _key(tensor) not in self._weights]
        return [(_key(t), t.untyped_storage().nbytes()) for t in others if _key(t) not in self._parts]


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
