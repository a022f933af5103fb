"""NoReplicas: what moves buckets where there is one replica, whose gradients are late and so lie in buckets, too."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class NoReplicas:
    """Stands for a `_C.BucketSync` where there is one replica: sums are what it has."""

    by_library = False

    def begin(self, step: int, gather_order: list[int]) -> None:
        """Nobody else begins."""

    def reduce(self, bucket: int, gradients: Tensor, scale: float, as_bfloat16: bool = False) -> None:
        """The mean of one."""

    def gather(self, bucket: int, tensor: Tensor, as_bfloat16: bool = False) -> None:
        """The shard is the whole."""

    def wait_reduced(self, bucket: int, step: int | None = None) -> None:
        """Returns."""

    def wait_gathered(self, bucket: int) -> None:
        """Returns."""

    def is_gathered(self, bucket: int) -> bool:
        """Always."""
        return True

    def drain(self) -> None:
        """Returns."""

    def bandwidth(self) -> float:
        """Nothing is sent."""
        return 0.0

    def take_records(self) -> list[Any]:
        """Returns none."""
        return []

    def abort(self, reason: str) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""
