"""Which part of each weight a rank of a tensor-parallel group holds: found out by running blocks, and proved.

Knows models and recordings; no process group. Used by weights, placement, stage and checkpoint.
"""
