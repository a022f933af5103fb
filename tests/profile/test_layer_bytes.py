"""What a step on tensors without values says of memory, against torch's allocator."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fold3d import _C
from fold3d.plan.costs import LayerBytes, estimated
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.trace import trace
from tests.helpers.layer_sums import activations_of, recomputed
from tests.helpers.models import MODELS

WIDTH, ROWS = 64, 32
ROW_BYTES = 4 * WIDTH * ROWS


class Blocks(nn.Module):
    """Two products: what is between them is kept, and what the last one hands on."""

    def __init__(self, count=4, checkpointed=False):
        super().__init__()
        parts = [(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)]
        self.layers = nn.ModuleList(nn.Sequential(*part) for part in parts)
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.square().sum()


def counted(model, batch):
    """Returns the bytes that stay after a real forward, and the most of it and of the backward."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert _C.count_cpu_bytes(True)
    try:
        for _ in range(2):  # the first makes what stays
            base = _C.live_cpu_bytes()
            _C.reset_peak_cpu_bytes()
            result = model(**batch)
            loss = result if isinstance(result, torch.Tensor) else result.loss
            del result
            forward, saved = _C.peak_cpu_bytes() - base, _C.live_cpu_bytes() - base
            _C.reset_peak_cpu_bytes()
            loss.backward()
            backward = _C.peak_cpu_bytes() - base
            del loss
    finally:
        _C.count_cpu_bytes(False)
    return saved, forward, backward


def test_each_layer_keeps_what_it_makes():
    batch = {"x": torch.zeros(ROWS, WIDTH)}
    found = layer_bytes(Blocks(), trace(Blocks(), example=batch), batch)
    assert [layer.saved for layer in found] == [0, *(2 * ROW_BYTES,) * 4, 4]
    assert [layer.outputs for layer in found[1:-1]] == [ROW_BYTES] * 4
    assert found[1].forward == 2 * ROW_BYTES  # the product beside the result
    again = layer_bytes(Blocks(checkpointed=True), trace(Blocks(), example=batch), batch)
    assert [layer.saved for layer in again[1:-1]] == [ROW_BYTES] * 4
    assert again[1].backward >= found[1].backward


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_needs_what_the_allocator_gives_out(kind):
    from transformers import AutoModelForCausalLM

    config = MODELS[kind]()
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(4, 64, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    layers = layer_bytes(model, trace(model, example=batch), batch)
    whole = activations_of(layers, 0)
    saved, forward, backward = counted(model, {**batch, "use_cache": False})
    assert whole.saved == pytest.approx(saved, rel=0.08)
    assert whole.forward == pytest.approx(forward, rel=0.08)
    assert whole.backward == pytest.approx(backward, rel=0.08)


def test_layers_add_up():
    layers = [LayerBytes(saved=10, outputs=4, forward=14, backward=20)] * 3
    whole = activations_of(layers, 0)
    assert (whole.saved, whole.forward, whole.backward) == (30, 34, 40)
    # In front of another chunk: what is handed on counts there, and the gradient has arrived.
    cut = activations_of(layers, 4)
    assert (cut.saved, cut.forward, cut.backward) == (26, 34, 36)
    again = recomputed(layers[0], 4)
    assert (again.saved, again.outputs, again.backward) == (4, 4, 20)
    assert estimated(10, 4) == LayerBytes(saved=10, outputs=4, forward=14, backward=18)


def test_the_count_of_bytes_follows_every_tensor():
    before = _C.live_cpu_bytes()
    assert not _C.is_counted(torch.zeros(10))
    assert _C.count_cpu_bytes(True)
    try:
        base = _C.live_cpu_bytes()
        kept = torch.zeros(1 << 20)
        _C.reset_peak_cpu_bytes()
        assert _C.is_counted(kept) and 1 << 22 <= _C.live_cpu_bytes() - base < (1 << 22) + 8192
        (kept + 1).sum()
        assert 1 << 23 <= _C.peak_cpu_bytes() - base < (1 << 23) + (1 << 16)
        kept.resize_(1 << 21)
        assert _C.live_cpu_bytes() - base >= 1 << 23
    finally:
        assert not _C.count_cpu_bytes(False)
    del kept  # allocated while it was counted: it leaves the figures although nobody counts any more
    assert _C.live_cpu_bytes() - before < 8192 and not _C.is_counted(torch.zeros(10))


class MakesTensors(nn.Module):
    """Blocks with a tensor that they make, where there is one CPU."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + torch.ones(16, device="cpu")
        return x.mean()


def test_a_cpu_with_a_number_is_the_cpu():
    """In distributed training accelerate calls it cpu:0."""
    model, example = MakesTensors(), {"x": torch.zeros(8, 16)}
    recorded = trace(model, example=example, blocks="layers")
    assert layer_bytes(model, recorded, example, "cpu:0") == layer_bytes(model, recorded, example, "cpu")
