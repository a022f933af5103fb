"""Weights that are frozen when the engine is built, and trained later, get the gradients of all ranks with a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from tests.helpers import models
from tests.helpers.ranks import RankPool


def trained(layout: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Returns norms of two steps, before the second of which all is unfrozen, and the weights then."""
    model: nn.Module = models.build(models.llama_config(layers=2, tied=True), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    engine = Engine(
        model,
        ParallelConfig(micro_batches=2, **layout),
        optimizer=lambda given: torch.optim.SGD(model.parameters(), lr=0.5),
    )
    ids = torch.randint(0, models.VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))
    norms = []
    for _ in range(2):
        engine.step({"input_ids": ids, "labels": ids})
        norms.append(float(engine.grad_norm()))
        model.requires_grad_(True)
    state = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    engine.close()
    return norms, state


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}], ids=str)
def test_frozen_at_first(ranks: RankPool, layout: dict[str, Any]) -> None:
    alone = ranks.run(trained, 1, {})[0]
    for found in ranks.run(trained, 2, layout):
        torch.testing.assert_close(found, alone, rtol=0.0, atol=1e-7)  # its loss and norms are computed in float32
