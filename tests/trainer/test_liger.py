"""Liger: its element-wise kernels are recorded without a GPU, its losses refused with what to take instead."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama import modeling_llama

import fold3d
from fold3d.errors import ConfigError
from fold3d.trace import trace
from tests.helpers import models


class NeedsMemory(torch.autograd.Function):
    """As a Triton kernel: looks where its arguments lie."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        raise RuntimeError("Cannot access data pointer of Tensor")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


FUNCTIONS = ("LigerRMSNormFunction", "LigerSiLUMulFunction", "LigerRopeFunction")


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library of such functions, which stands in Llama as Liger does."""
    made: Any = types.ModuleType("liger_kernel.ops")
    for name in FUNCTIONS:
        setattr(made, name, type(name, (NeedsMemory,), {}))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", made)

    def norm(self: Any, x: Tensor) -> Tensor:
        return made.LigerRMSNormFunction.apply(x, self.weight, self.variance_epsilon, 0.0, "llama")  # type: ignore[no-any-return]

    def mlp(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(made.LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x), 1.0, 1.0))  # type: ignore[no-any-return]

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return made.LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", mlp)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rope)
    return made


def test_a_recording_runs_no_kernel(ops: Any) -> None:
    model = models.build(models.llama_config(layers=2))
    ids = {"input_ids": torch.arange(8).view(1, 8)}
    with pytest.raises(RuntimeError, match="data pointer"):
        model(**ids)
    found = trace(model, example=ids)
    assert all(not reason for reason in found.borders[1:])
    assert {shape for shapes in found.shapes for shape, _ in shapes} == {(1, 8, 16)}
    with pytest.raises(RuntimeError, match="data pointer"):  # its functions are its own again
        model(**ids)


def test_what_stands_in_is_of_the_same_shape(ops: Any) -> None:
    from fold3d.trace.without_values import without_kernels

    x, weight = torch.randn(2, 3, 8, dtype=torch.bfloat16), torch.ones(8)
    with without_kernels():
        assert ops.LigerRMSNormFunction.apply(x, weight, 1e-6).dtype == x.dtype
        torch.testing.assert_close(ops.LigerSiLUMulFunction.apply(x, x), functional.silu(x) * x)
        assert [t.shape for t in ops.LigerRopeFunction.apply(x, x[:1], weight, weight)] == [(2, 3, 8), (1, 3, 8)]


@pytest.mark.parametrize("config", [None, {}, {"fused_linear_cross_entropy": False, "cross_entropy": True}])
def test_its_losses_are_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"Liger's losses.*'fused_linear_cross_entropy': False.*chunked_loss=1024"):
        fold3d.TrainingArguments(output_dir="unused", use_liger_kernel=True, liger_kernel_config=config)


def test_with_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="use_liger_kernel=True with tp=2"):
        fold3d.TrainingArguments(
            output_dir="unused", tp=2, use_liger_kernel=True,
            liger_kernel_config={"fused_linear_cross_entropy": False},
        )  # fmt: skip
