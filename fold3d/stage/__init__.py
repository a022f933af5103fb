"""What a stage runs: its part of the unmodified model, chunk by chunk, by the model's own forward.

Knows recordings and weights; no process group, no schedule. Used by the engine and by data_parallel.
"""
