"""Compound parameters: layers of a library that nobody knows are recorded, let go of and copied."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.config import ParallelConfig
from fold3d.engine.arguments import check_model
from fold3d.errors import ConfigError
from fold3d.profile.calls import real_copy
from fold3d.trace import trace
from fold3d.trace.compound import bytes_of, held, holders, is_compound, parts_of
from fold3d.weights.release import release
from tests.trace.zoo import build


class Scales:
    """What hangs on a parameter."""

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor
        self.nested = {"more": [torch.ones(3)]}


class Packed(nn.Parameter):
    """Two numbers of four bits in a byte, and their scale."""

    scales: Scales

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        factor = weight.abs().max() / 7
        numbers = (weight / factor).round().clamp(-8, 7).add(8).to(torch.uint8).flatten()
        made: Any = torch.Tensor._make_subclass(cls, numbers[::2] * 16 + numbers[1::2], False)
        made.scales = Scales(factor)
        return made  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: Any) -> Packed:
        made: Any = torch.Tensor._make_subclass(Packed, self.data.clone(), False)
        made.scales = copy.deepcopy(self.scales, memo)
        return made  # type: ignore[no-any-return]


class PackedLinear(nn.Linear):
    """Looks at the values of its weight, which recordings do not have; keeps the scales after the first call."""

    weight: Any

    def forward(self, input: Tensor) -> Tensor:
        scales = self.weight.scales
        self.kept = scales
        numbers = torch.stack([self.weight.data // 16, self.weight.data % 16], -1).flatten()
        if int(numbers.max()) > 15:
            raise ValueError("no numbers of four bits")
        whole = (numbers.float() - 8).mul(scales.factor).view(self.out_features, self.in_features)
        return nn.functional.linear(input.to(whole.dtype), whole, self.bias).to(input.dtype)


def packed(model: nn.Module) -> nn.Module:
    """Quantises the linear layers of the blocks."""
    for block in model.model.layers:  # type: ignore[union-attr]
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                new = PackedLinear(module.in_features, module.out_features, bias=False)
                new.weight = Packed.of(module.weight.detach())
                holder, _, attribute = name.rpartition(".")
                setattr(block.get_submodule(holder), attribute, new)
    return model


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(8).view(1, 8)}


def test_a_recording_sees_the_linear_layers_that_they_stand_for() -> None:
    plain, quantised = build("llama"), packed(build("llama"))
    wanted, found = trace(plain, example=tokens()), trace(quantised, example=tokens())
    assert [cost.flops for cost in found.costs] == [cost.flops for cost in wanted.costs]
    assert found.shapes == wanted.shapes and found.borders == wanted.borders
    assert not found.converted


def test_its_bytes_are_those_of_all_its_parts() -> None:
    model = packed(build("llama"))
    weight = model.model.layers[0].mlp.up_proj.weight  # type: ignore[union-attr,index]
    assert is_compound(weight) and not is_compound(model.lm_head.weight)  # type: ignore[union-attr,arg-type]
    assert len(parts_of(weight)) == 3
    assert bytes_of(weight) == weight.numel() + 8 + 12


def test_a_subclass_that_carries_nothing_is_plain() -> None:
    class Named(nn.Parameter):
        pass

    assert not is_compound(Named(torch.ones(2)))


def test_release_frees_what_hangs_on_parameters_and_modules() -> None:
    model = packed(build("llama")).eval()
    model(**tokens())  # modules keep scales of their own now
    layers = list(holders(model))
    gone = [weakref.ref(part) for _, module in layers[1:] for part in parts_of(module.weight)]  # type: ignore[arg-type]
    gone += [weakref.ref(module.kept.factor) for _, module in layers[1:]]  # type: ignore[union-attr]
    first = f"{layers[0][0]}.weight"
    release(model, {first})
    gc.collect()
    assert all(reference() is None for reference in gone)
    assert layers[0][1].kept.factor.device.type == "cpu"  # type: ignore[union-attr]
    assert layers[1][1].kept.factor.is_meta  # type: ignore[union-attr]
    assert all(is_compound(module.weight) for _, module in layers), "recorded again, they are linear layers again"  # type: ignore[arg-type]
    assert trace(model, example=tokens()).blocks


def test_what_replicas_share() -> None:
    """With the scales, each memory once, before and after the module has taken them."""
    model = packed(build("llama"))
    module = model.model.layers[0].mlp.up_proj  # type: ignore[union-attr,index]
    before = held(module)  # type: ignore[arg-type]
    assert len(before) == 3
    model(**tokens())
    assert {id(one) for one in held(module)} == {id(one) for one in before}  # type: ignore[arg-type]


def test_a_copy_that_is_timed_computes_the_same() -> None:
    block = packed(build("llama")).model.layers[0].mlp  # type: ignore[union-attr,index]
    made = real_copy(block, torch.device("cpu"), torch.Generator().manual_seed(0))
    given = torch.randn(2, 32)
    torch.testing.assert_close(made(given), block(given), rtol=0, atol=0)
    assert made.up_proj.weight is not block.up_proj.weight  # type: ignore[union-attr]


def test_shards_and_training_are_refused() -> None:
    model = packed(build("llama"))
    with pytest.raises(ConfigError, match=r"tp=2 is not available for quantised weights.*Set tp=1"):
        check_model(model, ParallelConfig(tp=2), None)
    check_model(model, ParallelConfig(pp=2), None)
    floating: Any = torch.Tensor._make_subclass(Packed, torch.ones(4), True)
    floating.scales = Scales(torch.ones(()))
    model.model.layers[0].mlp.up_proj.weight = floating  # type: ignore[union-attr,index]
    with pytest.raises(ConfigError, match=r"cannot be trained.*LoRA"):
        check_model(model, ParallelConfig(pp=2), None)
