"""Which chunk and stage holds, needs and sums which parameter; how a model is partitioned; what a bucket is.

Names and numbers: no tensors move here, no process group. Used by the planner, the engine and DP.sync.
"""

import torch  # noqa: F401  loads the libraries that _C is linked with
