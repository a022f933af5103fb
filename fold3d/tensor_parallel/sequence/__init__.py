"""Sequence parallelism: outside of regions each rank of a tensor-parallel group works on its part of the sequence."""
