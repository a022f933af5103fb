"""shared_shadows(): one copy of a model answers all questions, each as a copy of its own would."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.profile.calls import record_calls
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.trace import shadow as shadow_module
from fold3d.trace import trace
from fold3d.trace.shadow import Shadow, fake_copy, shadow_of, shared_shadows

WIDTH = 8


class Settings:
    def __init__(self) -> None:
        self.calls = 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).relu()
        return y


class Remembering(nn.Module):
    """Whose forward changes whatever a module can hold, and does something else the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.settings, self.lengths, self.names = Settings(), [1], {"a"}
        self.table: OrderedDict[str, Any] = OrderedDict(first=[0])

    def forward(self, x: Tensor) -> Tensor:
        if self.settings.calls:
            x = torch.cat([x, x], 1)
        self.settings.calls += 1
        self.lengths.append(x.shape[1])
        self.names.add("b")
        self.table["first"].append(1)
        self.table["second"] = x
        self.seen = self.seen + x.sum((0, 1))
        self.kept = x
        self.layers[0].register_forward_hook(lambda *_: None)
        for layer in self.layers:
            x = layer(x)
        return x


def answers(model: nn.Module, batch: dict[str, Tensor]) -> list[Any]:
    recording = trace(model, example=batch)
    calls = record_calls(model, ["layers.0", "layers.1"], batch)
    return [recording, calls, layer_bytes(model, recording, batch), trace(model, example=batch)]


def test_each_question_is_answered_as_by_a_copy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[nn.Module] = []

    def counted(model: nn.Module, *others: Any) -> nn.Module:
        copied.append(model)
        return fake_copy(model, *others)

    monkeypatch.setattr(shadow_module, "fake_copy", counted)
    model, batch = Remembering(), {"x": torch.randn(2, 5, WIDTH)}
    alone = answers(model, batch)
    assert len(copied) == 4
    with shared_shadows():
        assert answers(model, batch) == alone
    assert len(copied) == 5 and model.settings.calls == 0
    assert alone[1]["layers.0"].args[0].shape == (2, 5, WIDTH)


def test_a_question_leaves_nothing_on_the_copy() -> None:
    shadow = Shadow(Remembering())
    before = {name: dict(vars(module)) for name, module in shadow.model.named_modules()}
    dtype = shadow.model.layers[0].linear.weight.dtype
    with shadow.ask():
        shadow.model.layers[0].forward = lambda x: x
        shadow.model.layers[0].linear.weight.grad = shadow.model.layers[0].linear.weight.detach()
        shadow.model.layers[1].requires_grad_(False)
        with shadow.running(), torch.no_grad():
            shadow.model.layers[1].to(torch.bfloat16)
            shadow.call(shadow.arguments({"x": torch.randn(2, 5, WIDTH)}))
    after = {name: dict(vars(module)) for name, module in shadow.model.named_modules()}
    assert after.keys() == before.keys()
    for name, held in after.items():
        assert held.keys() == before[name].keys() and all(held[key] is before[name][key] for key in held)
    model = shadow.model
    assert model.lengths == [1] and model.names == {"a"} and model.table == OrderedDict(first=[0])
    assert model.settings.calls == 0 and not model.layers[0]._forward_hooks
    assert all(one.dtype == dtype and one.grad is None and one.requires_grad for one in model.parameters())


def test_a_question_within_a_question_has_a_copy_of_its_own() -> None:
    model = Remembering()
    with shared_shadows(), shadow_of(model) as one:
        with shadow_of(model) as other:
            assert other is not one
        with shadow_of(Remembering()) as third:
            assert third not in (one, other)
