"""chunk_layers against what the trace says about who needs which parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fold3d.placement.layers import PROLOGUE, chunk_layers
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.placement.partition import split_ranges
from fold3d.topology import LOOP, V, chunks_of
from fold3d.trace import trace
from tests.trace.chains import needed_parameters


class Tied(nn.Module):
    """An embedding whose weight is also the head's, a norm between, and a scale that every block's caller reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        y = self.embed(x)
        for block in self.blocks:
            y = block(y) * self.scale
        return self.head(self.norm(y)).sum()


@pytest.mark.parametrize("pp, segments, style", [(1, 1, LOOP), (1, 2, LOOP), (2, 1, LOOP), (2, 2, LOOP), (2, 2, V)])
def test_layers_hold_what_their_stage_owns(pp, segments, style):
    model = Tied()
    recorded = trace(model, example={"x": torch.zeros(2, 3, dtype=torch.long)})
    ranges = split_ranges(recorded, pp * segments)
    chunks = chunk_layers(recorded, ranges, pp, style)
    canonical = recorded.canonical()
    assert [layer.block for layers in chunks for layer in layers] == [PROLOGUE, *range(4), 4]
    for stage in range(pp):
        mine = chunks_of(stage, len(ranges), pp, style)
        names = [name for chunk in mine for layer in chunks[chunk] for name in layer.parameters]
        owned = {
            canonical.get(name, name) for chunk in mine for name in needed_parameters(model, recorded, ranges, chunk)
        }
        assert len(names) == len(set(names)) and set(names) == owned
    assert "embed.weight" in chunks[0][0].parameters and "scale" in chunks[0][0].parameters
    assert chunks[0][1].parameters == ("blocks.0.weight", "blocks.0.bias")
    epilogue = chunks[-1][-1].parameters
    assert "norm.weight" in epilogue and ("embed.weight" in epilogue) == (pp > 1 and style == LOOP)


class Heads(nn.Module):
    """Of three heads, and of a tower in front, the batch says which run."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1, affine=False)) for _ in range(3))

    def forward(self, x, task, images=None):
        if images is not None:
            x = x + self.tower(images)
        for block in self.blocks:
            x = block(x)
        return self.heads[int(task[0])](x).sum()


def test_what_no_forward_has_read_lies_where_the_model_says():
    """Behind the blocks: on the last stage, in the layer there whose gradients are summed last."""
    model, x = Heads(), torch.zeros(2, 6)
    names = [name for name, _ in model.named_parameters()]
    first, second = (trace(model, example={"x": x, "task": torch.full((2,), task)}) for task in (0, 1))
    third = trace(model, example={"x": x, "task": torch.full((2,), 1), "images": x})
    ranges = split_ranges(first, 4)
    found = ParameterPlacement.of(names, first, ranges, 2, ())
    assert {found.home(name) for name in names if name.startswith("heads.")} == {1} and found.home("tower.bias") == 0
    assert found.stage_of_module("heads.2.1.running_mean") == 1
    assert found.readers["heads.0.0.bias"] == (3,)
    assert found.readers["heads.2.0.bias"] == (1, 3), "any chunk of the stage may read it one day"
    chunks = chunk_layers(first, ranges, 2)
    assert {"heads.1.0.weight", "heads.2.0.weight"} <= {*chunks[1][0].parameters}
    merged = first.layout().with_uses_of([second.layout(), third.layout()], names)
    assert merged.unread == ("heads.2.0.weight", "heads.2.0.bias")
    assert {"heads.0.0.weight", "heads.1.0.weight"} <= {*merged.uses[-1]} and "tower.weight" in merged.uses[0]
    assert merged.uses == third.layout().with_uses_of([second.layout(), first.layout()], names).uses
    assert second.placed_as(merged).form == second.form
