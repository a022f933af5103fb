"""Which part of each weight a rank of a tensor-parallel group holds, and what its blocks do differently: values.

No process group; `fold3d.splitting` finds them out. Used by weights, placement, tensor_parallel, stage and checkpoint.
"""
