"""The planner: profile, links, candidate settings, search; what it finds is a Choice."""

import torch  # noqa: F401  loads the libraries that _C is linked with
