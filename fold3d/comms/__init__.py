"""Groups of ranks and small exchanges between them; connections for pipeline messages and rings.

Knows torch.distributed and `fold3d._C`; no model and no schedule. Every wait ends at its time limit or with the job.
"""
