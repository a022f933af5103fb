"""DP.sync: summing gradients over the replicas under the computation, exactly."""

from fold3d.data_parallel.dp_sync import DpSync

__all__ = ["DpSync"]
