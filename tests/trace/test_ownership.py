"""owned_parameters() and release(): who holds what, and that memory is given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from fold3d.errors import ConfigError
from fold3d.placement.partition import split_ranges
from fold3d.weights.ownership import owned_parameters, release
from tests.trace.chains import record
from tests.trace.test_capture import Skipping
from tests.trace.zoo import FAMILIES, build, plain, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_an_owner_and_only_tied_ones_have_two(family: str) -> None:
    model = build(family)
    recorded = record(model)
    ranges = [(0, 1), (1, 2), (2, 4)]
    owners: dict[str, list[int]] = {name: [] for name, _ in model.named_parameters(remove_duplicate=False)}
    for chunk in range(3):
        for name in owned_parameters(model, recorded, ranges, chunk):
            owners[name].append(chunk)
    tied = recorded.canonical()
    assert all(chunks for chunks in owners.values())
    for name, chunks in owners.items():
        assert len(chunks) == 1 or (name in tied and chunks == [0, 2]), name


def test_plain_module() -> None:
    model = plain()
    recorded = record(model, tokens())
    first = set(owned_parameters(model, recorded, [(0, 2), (2, 4)], 0))
    last = set(owned_parameters(model, recorded, [(0, 2), (2, 4)], 1))
    assert first & last == {"embedding.weight", "head.weight", "position", "scale"}
    assert {name for name in first if name.startswith("layers")} == {
        f"layers.{i}.{p}" for i in (0, 1) for p in
        ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    }  # fmt: skip


def test_release_frees_memory_and_keeps_everything_else() -> None:
    model = build("gpt2")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [id(module) for module in model.modules()]
    kept = model.transformer.h[1].mlp.c_fc.weight
    gone = [weakref.ref(p) for p in model.parameters() if p is not kept]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    release(model, {"transformer.h.1.mlp.c_fc.weight"})
    gc.collect()
    assert all(reference() is None for reference in gone)
    assert model.transformer.h[1].mlp.c_fc.weight is kept
    assert kept.requires_grad
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert [id(module) for module in model.modules()] == modules
    for name, parameter in model.named_parameters():
        assert parameter.shape == shapes[name]
        assert parameter.is_meta != (parameter is kept)
        assert parameter.requires_grad == (parameter is kept)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_release_keeps_a_tied_parameter_by_any_of_its_names() -> None:
    model = build("gpt2")
    release(model, {"lm_head.weight"})
    assert not model.transformer.wte.weight.is_meta
    assert model.lm_head.weight is model.transformer.wte.weight


def test_release_of_a_recurrent_module() -> None:
    model = nn.LSTM(4, 4)
    release(model, set())
    assert all(weight.is_meta for weight in model._flat_weights)


class TestRanges:
    def test_the_head_counts(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        with torch.device("meta"):
            model = GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=64, n_head=4, vocab_size=4096))
        ranges = split_ranges(record(model), 2)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == 8
        assert ranges[0][1] == ranges[1][0]
        assert ranges[0][1] > 4  # logits cost more than the embedding

    @pytest.mark.parametrize("chunks", [1, 2, 3, 4])
    def test_ranges_cover_the_blocks(self, chunks: int) -> None:
        recorded = record(build("llama"))
        ranges = split_ranges(recorded, chunks)
        recorded.check_ranges(ranges)
        assert len(ranges) == chunks

    def test_more_chunks_than_blocks(self) -> None:
        with pytest.raises(ConfigError, match=r"5 chunks \(pp \* segments\).* has 4 blocks; lower segments or pp"):
            split_ranges(record(build("llama")), 5)

    def test_forbidden_borders_are_avoided(self) -> None:
        recorded = record(Skipping("block"), {"x": torch.zeros(2, 8)})
        assert split_ranges(recorded, 3) == [(0, 1), (1, 2), (2, 5)]
        with pytest.raises(ConfigError, match=r"4 chunks .* 5 blocks, and it can be cut at 2 of 4 borders only"):
            split_ranges(recorded, 4)
