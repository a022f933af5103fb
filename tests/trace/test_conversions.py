"""Modules that convert themselves in a forward, as routers do that compute in another precision than the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fold3d.errors import TraceError
from fold3d.profile.layers import assumed_profile
from fold3d.trace import trace
from fold3d.trace.without_values import converting
from tests.trace.chains import assert_equal, chained, ranks_of, whole


class Router(nn.Module):
    """A block that asks in every forward that its classifier has a precision."""

    def __init__(self, target: torch.dtype | str) -> None:
        super().__init__()
        self.body, self.classifier, self.target = nn.Linear(8, 8), nn.Linear(8, 8), target

    def forward(self, hidden: Tensor) -> Tensor:
        self.classifier = self.classifier.to(self.target)
        weights = self.classifier(hidden.to(self.classifier.weight.dtype)).softmax(-1)
        return hidden + self.body(hidden) * weights.to(hidden.dtype)


class Routed(nn.Module):
    """Four such blocks."""

    def __init__(self, target: torch.dtype | str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router(target) for _ in range(4))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            inputs = layer(inputs)
        return {"loss": inputs.square().mean()}


def built(target: torch.dtype | str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Routed(target).to(dtype)


BATCH = {"inputs": torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).reshape(3, 8)}


@pytest.mark.parametrize("target", [torch.float64, torch.float32, "cpu"])
def test_blocks_that_convert_their_router_are_exact(target: torch.dtype | str) -> None:
    model = built(target, torch.float64)
    recorded = trace(model, example=BATCH)
    names = [f"layers.{layer}.classifier.{kind}" for layer in range(4) for kind in ("weight", "bias")]
    converted = [(name, torch.float32) for name in names] if target == torch.float32 else []
    assert list(recorded.converted) == converted
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}, "only the copy was converted"
    ranges = [(0, 1), (1, 2), (2, 3), (3, 4)]
    got = chained(ranks_of(model, recorded, ranges, 2), recorded, 4, BATCH)
    assert_equal(got, whole(model, BATCH))
    assert {name for name, one in model.named_parameters() if one.dtype == torch.float32} == {n for n, _ in converted}


def test_a_parameter_that_moves_in_the_forward_is_refused_with_that_reason() -> None:
    with pytest.raises(TraceError, match=r"converts the parameter 'weight' of a Linear from .* on cpu to .* on meta"):
        trace(built("meta", torch.float64), example=BATCH)


def test_outside_of_recordings_modules_convert_as_torch_has_it() -> None:
    own = nn.Module._apply
    with pytest.raises(KeyError), converting():
        assert nn.Module._apply is not own
        raise KeyError
    assert nn.Module._apply is own


def test_plans_count_parameters_in_the_dtype_that_they_are_converted_to() -> None:
    model = built(torch.float32, torch.bfloat16)
    batch = {"inputs": BATCH["inputs"].bfloat16()}
    profile = assumed_profile(model, trace(model, example=batch), batch, flops_per_second=1e9)
    assert profile.parameter_bytes["layers.0.classifier.weight"] == 4 * 8 * 8
    assert profile.parameter_bytes["layers.0.body.weight"] == 2 * 8 * 8
