"""DP.sync: summing gradients over the replicas under the computation, exactly."""

from fold3d.runtime.dp_sync.dp_sync import DpSync

__all__ = ["DpSync"]
