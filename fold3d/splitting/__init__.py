"""Finding out how a model is spread over a tensor-parallel group: its blocks are run, with stubs in the place of their
matrix products, and what was found is proved before weights move. No process group, and no weights.
"""

from __future__ import annotations

from fold3d.splitting.plan_sharding import plan_sharding

__all__ = ["plan_sharding"]
