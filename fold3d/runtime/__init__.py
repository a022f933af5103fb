"""The runtime: Engine and what a rank needs to run steps."""

import torch  # noqa: F401  loads the libraries that _C is linked with
