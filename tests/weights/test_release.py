"""release(): memory is given back, everything else stays."""

from __future__ import annotations

import gc
import weakref

from torch import nn

from fold3d.weights.release import release
from tests.trace.zoo import build


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
