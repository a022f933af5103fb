"""WholeAttention gives what torch's attention gives, as far as shapes and FLOPs go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fold3d.trace import trace
from fold3d.trace.recorder import flops_of

_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.1},
    "mask": {"attn_mask": True},
    "grouped": {"enable_gqa": True, "keys": 2},
    "values of another width": {"width": 6},
    "cross attention": {"length": 5},
    "no heads": {"heads": False},
    "a batch for all": {"keys_of_all": True},
}


class _Block(nn.Module):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 4 * case.get("keys", 4))
        self.value = nn.Linear(16, case.get("width", 4) * case.get("keys", 4))
        self.out = nn.Linear(4 * case.get("width", 4), 16)
        self._case = case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        case = dict(self._case)
        heads, length, same = case.pop("heads", True), case.pop("length", x.shape[1]), case.pop("keys_of_all", False)
        keys, _ = case.pop("keys", 4), case.pop("width", 4)
        seen = x[:1, :length] if same else x[:, :length]
        query, key, value = self.query(x), self.key(seen), self.value(seen)
        if heads:
            query, key, value = (
                one.unflatten(-1, (number, -1)).transpose(1, 2)
                for one, number in ((query, 4), (key, keys), (value, keys))
            )
        if case.pop("attn_mask", False):
            case["attn_mask"] = torch.ones(x.shape[1], length, dtype=torch.bool).tril()
        found = nn.functional.scaled_dot_product_attention(query, key, value, **case)
        found = found.transpose(1, 2).reshape(*x.shape[:2], -1) if heads else found
        return x + self.out(found)


class _Model(nn.Module):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(case) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("name", _CASES)
def test_attention_of_any_form_is_recorded_with_its_flops(name: str) -> None:
    case = _CASES[name]
    model, x = _Model(case), torch.randn(2, 7, 16)
    model(x)
    found = trace(model, example={"x": x})
    length, width, keys = case.get("length", 7), case.get("width", 4), case.get("keys", 4)
    rows = 1 if case.get("keys_of_all") else 2
    linear = 2 * 16 * (2 * 7 * 16 + rows * length * keys * (4 + width) + 2 * 7 * 4 * width)
    products = 2 * 2 * 4 * 7 * length * (4 + width)
    assert [cost.flops for cost in found.costs] == [linear + products] * 2


def test_attention_on_a_cpu_counts_as_attention_on_a_gpu() -> None:
    """Of two operators that torch counts itself and one that it does not; with fewer keys than queries."""
    query, key, value = torch.empty(2, 4, 7, 4), torch.empty(2, 4, 5, 4), torch.empty(2, 4, 5, 6)
    whole = 2 * 2 * 4 * 7 * 5 * (4 + 6)
    aten = torch.ops.aten
    for operator in (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_flash_attention_for_cpu):
        assert flops_of(operator, (query, key, value), {}, None) == whole
