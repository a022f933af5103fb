"""Every family is divided as expected, and its ranks together compute loss and gradients of the whole model."""

from __future__ import annotations

import pytest

from fold3d.splitting import plan_sharding
from tests.splitting.models import FAMILIES, build
from tests.splitting.shared import compare

WHOLE = {"olmo2": {"self_attn.*": "replicate"}}
"""Norms over all heads mix them: attention can be divided only by another order of computation."""


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_compute_the_whole(family: str, tp: int) -> None:
    tiny = build(family)
    plan = plan_sharding(tiny.model, tiny.trace(), tiny.batch, tp, WHOLE.get(family))
    assert compare(tiny.model, tiny.batch, plan) < 1e-10
    divided = sum(
        tiny.model.get_parameter(name).numel() for name, shard in plan.shards.items() if not shard.is_replicated
    )
    total = sum(parameter.numel() for name in plan.blocks for parameter in tiny.model.get_submodule(name).parameters())
    assert divided > (0.5 if family in WHOLE else 0.7) * total
