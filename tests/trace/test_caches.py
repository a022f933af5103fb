"""What a model's code caches while it is recorded, or divided, is not there when it trains."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fold3d.profile.calls import record_calls
from fold3d.splitting import plan_sharding
from fold3d.trace.capture import trace
from tests.helpers import data

_KNOWN: dict[int, Tensor] = {}
_LAST: list[Tensor] = []
_ONLY: Tensor | None = None
_CALLS = itertools.count()


def table(length: int) -> Tensor:
    return torch.arange(float(length)).square() / 100


def hidden_in_a_closure(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers wraps an lru_cache."""
    cached = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return cached(*args)

    return wrapper


@functools.lru_cache
def by_a_function(length: int) -> tuple[Tensor, str]:
    return table(length), "in a tuple"


@functools.cache
def number_of_calls() -> int:
    return next(_CALLS)


def by_a_dictionary(length: int, known: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    for store in (known, _KNOWN):
        if length not in store:
            store[length] = table(length)
    return known[length] + _KNOWN[length]


def by_variables(length: int) -> Tensor:
    global _ONLY
    if _ONLY is None:
        _ONLY = table(length)
    if not _LAST:
        _LAST.append(table(length))
    return _ONLY + _LAST[0]


class Caching(nn.Module):
    """A layer which keeps tensors in every place that code has."""

    kept: Tensor | None = None
    by_name: ClassVar[dict[str, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    @staticmethod
    @hidden_in_a_closure
    def by_wrapper(length: int) -> Tensor:
        return table(length)

    @functools.lru_cache  # noqa: B019
    def by_method(self, length: int) -> Tensor:
        return table(length)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, 8]."""
        cls, length = type(self), x.shape[-1]
        if cls.kept is None:
            cls.kept = table(length)
        cls.by_name.setdefault("a", table(length))
        number_of_calls()
        added = self.by_wrapper(length) + self.by_method(length) + by_function_of(length)
        return x + self.inner(x) + added + cls.kept + cls.by_name["a"] + by_a_dictionary(length) + by_variables(length)


def by_function_of(length: int) -> Tensor:
    return by_a_function(length)[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caching() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a number."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_nothing_without_values_is_left_anywhere() -> None:
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.randn(2, 8)}
    calls = number_of_calls()
    trace(model, example=batch)
    record_calls(model, ["layers.1"], batch)
    assert Caching.kept is _ONLY is None and not _KNOWN and not _LAST and not Caching.by_name
    assert by_a_function.cache_info().currsize == 0
    wanted = 9 * table(8).sum().item()
    layer = model.layers[0]
    with torch.no_grad():
        added = layer(torch.zeros(1, 8)) - layer.inner(torch.zeros(1, 8))
    assert type(added) is Tensor and added.sum().item() == pytest.approx(wanted)
    kept = (Caching.kept, _ONLY, _LAST[0], _KNOWN[8], Caching.by_name["a"], by_a_function(8)[0])
    trace(model, example={"x": torch.randn(2, 8)})
    now = (Caching.kept, _ONLY, _LAST[0], _KNOWN[8], Caching.by_name["a"], by_a_function(8)[0])
    assert all(a is b and not isinstance(a, FakeTensor) for a, b in zip(kept, now, strict=True)), "what was real stays"
    assert number_of_calls() == calls, "what holds no tensor stays"


@pytest.mark.parametrize("family", ["Beit", "Data2VecVision"])
def test_an_index_of_relative_positions_is_no_tensor_without_values(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_labels=5,
        use_relative_position_bias=True,
        out_indices=[1],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForImageClassification")(config).train()
    batch: dict[str, Any] = data.images(4, 8, 5, dtype=torch.float32)
    recorded = trace(model, example=batch)
    loss = model(**batch).loss
    loss.backward()
    assert type(loss.detach()) is Tensor and len(recorded.blocks) == 4
    assert not any(recorded.borders), "each stage makes the index itself"
    shards = plan_sharding(model, recorded, batch, 2).shards
    assert any("relative_position_bias_table" in name for name in shards)
    other = type(model)(config).train()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(**batch).loss, loss)
