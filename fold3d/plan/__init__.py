"""What is decided about a run: Constraints (the user's) and costs in, one Strategy out. csrc/core/plan searches.

Knows no process group and no device; `fold3d.profile` measures, `fold3d.engine` asks and follows. Things that can be
chosen are in `space`, a file each; what the simulator is told, in `cluster_model`.
"""

import torch  # noqa: F401  loads the libraries that _C is linked with
