"""What runs where weights are sharded: TP.sync in the forwards of blocks, vocabulary-parallel losses, sub-pipelined
tensor parallelism.

Knows modules and the tensor-parallel group; no schedule, no pipeline, no replicas.
"""
