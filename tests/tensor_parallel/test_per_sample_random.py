"""PerSampleRandom: parts of a batch draw what the whole batch draws for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fold3d.tensor_parallel.random_draws import PerSampleRandom

SAMPLES, PARTS = 5, ((0, 3), (3, 5))
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "a dropout module": lambda x: torch.nn.Dropout(0.2)(x),
    "in place": lambda x: F.dropout(x.clone(), p=0.2, training=True, inplace=True),
    "of channels": lambda x: F.dropout2d(x[..., None], 0.5),
    "everything": lambda x: F.dropout(x, 1.0),
    "tokens of all samples in one dimension": lambda x: F.dropout(x.flatten(0, 1), 0.3).view_as(x),
    "drop path": lambda x: x * torch.rand((x.shape[0], 1, 1)),
    "drop path, sizes by themselves": lambda x: x * torch.rand(x.shape[0], 1, 1),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "bernoulli_": lambda x: x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.5),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
}


def in_parts(function: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> Tensor:
    parts = []
    for first, end in PARTS:
        torch.manual_seed(seed)
        with PerSampleRandom(first, end, SAMPLES) as mode:
            parts.append(function(x[first:end]))
        assert mode.used
    return torch.cat(parts)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_bits(name: str) -> None:
    x = torch.randn(SAMPLES, 4, 8)
    torch.manual_seed(3)
    whole = FUNCTIONS[name](x)
    assert torch.equal(in_parts(FUNCTIONS[name], x, 3), whole)
    if name != "everything":
        assert not torch.equal(in_parts(FUNCTIONS[name], x, 4), whole)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["no", "bool", "float"])
def test_attention(causal: bool, masked: str) -> None:
    if causal and masked != "no":
        return
    x = torch.randn(SAMPLES, 4, 6, 8, dtype=torch.float64)
    mask = {"no": None, "bool": torch.rand(6, 6) < 0.8, "float": torch.randn(6, 6, dtype=torch.float64)}[masked]
    if masked == "bool":
        mask = mask | torch.eye(6, dtype=torch.bool)  # type: ignore[operator]

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, q[:, :2], q[:, 2:], attn_mask=mask, dropout_p=0.3, is_causal=causal, scale=0.4, enable_gqa=True
        )

    torch.manual_seed(3)
    whole = attend(x)
    torch.testing.assert_close(in_parts(attend, x, 3), whole, rtol=1e-12, atol=1e-12)


def test_what_does_not_follow_the_samples_is_drawn_as_it_is() -> None:
    torch.manual_seed(3)
    whole = torch.rand(7)
    torch.manual_seed(3)
    with PerSampleRandom(0, 3, SAMPLES) as mode:
        assert torch.equal(torch.rand(7), whole)
        assert torch.equal(F.dropout(torch.ones(3), 0.5, training=False), torch.ones(3))
    assert not mode.used
