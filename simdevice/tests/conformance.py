"""Operators on the simulated device against the CPU: torch's own samples (OpInfo), forward and backward."""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

import simdevice.sim  # noqa: F401  registers the device

SAMPLES = 8
"""Of each operator, at most so many."""

GROUPS = {
    "pointwise": """
        add sub mul div.no_rounding_mode div.floor_rounding true_divide pow sqrt rsqrt exp log tanh sigmoid erf
        neg abs sign clamp where maximum minimum addcmul addcdiv lerp sin cos square reciprocal floor isnan
        isinf eq ne lt le gt ge logical_and logical_not bitwise_and float half bfloat16 to contiguous clone fill
        zero_ masked_fill lgamma
    """,
    "activations": """
        nn.functional.gelu nn.functional.silu nn.functional.relu nn.functional.leaky_relu nn.functional.softplus
        nn.functional.mish nn.functional.elu nn.functional.hardswish nn.functional.glu nn.functional.logsigmoid
        softmax log_softmax nn.functional.tanhshrink nn.functional.threshold
    """,
    "matrices": """
        matmul mm bmm addmm baddbmm mv dot outer einsum nn.functional.linear nn.functional.bilinear tril triu
        nn.functional.scaled_dot_product_attention linalg.vector_norm norm kron
    """,
    "normalisation": """
        nn.functional.layer_norm native_layer_norm nn.functional.rms_norm nn.functional.group_norm
        nn.functional.batch_norm nn.functional.normalize native_batch_norm nn.functional.local_response_norm
    """,
    "losses": """
        nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss nn.functional.l1_loss
        nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div nn.functional.smooth_l1_loss
        nn.functional.cosine_similarity nn.functional.ctc_loss
    """,
    "reductions": """
        sum mean amax amin max.reduction_with_dim min.reduction_with_dim argmax argmin var std prod logsumexp
        cumsum cumprod all any topk sort median count_nonzero nanmean
    """,
    "indexing": """
        nn.functional.embedding index_select gather scatter scatter_add index_add index_put take masked_select
        nonzero unique nn.functional.one_hot nn.functional.embedding_bag masked_scatter index_fill
        select_scatter __getitem__ isin searchsorted bincount repeat_interleave
    """,
    "views": """
        view reshape permute transpose expand squeeze unsqueeze chunk split split_with_sizes narrow select
        unbind flatten as_strided diagonal movedim unfold cat stack roll flip repeat tile
        nn.functional.pad.constant t view_as_real view_as_complex unflatten
    """,
    "convolutions": """
        nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.max_pool2d
        nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d nn.functional.interpolate.nearest
        nn.functional.interpolate.bilinear nn.functional.unfold
    """,
    "factories": """
        zeros_like ones_like full_like new_zeros new_ones new_full empty_like arange full zeros ones eye
        linspace
    """,
}
"""Names of OpInfos: what the training of transformers and their neighbours runs."""

NUMBERS_UNKNOWN = {"empty_like"}
"""Only sizes are compared."""


def check(group: str) -> tuple[int, list[str]]:
    """Compares the operators of a group; returns how many samples were compared, and what is wrong, a line each."""
    infos: dict[str, list[OpInfo]] = {}
    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        infos.setdefault(name, []).append(info)
    compared, wrong = 0, []
    for name in GROUPS[group].split():
        samples = 0
        for info in infos.get(name, []):
            for sample in _samples(info):
                problem = _compare(info, sample)
                if problem is None:
                    continue
                samples += 1
                if problem:
                    wrong.append(f"{name}: {problem}")
                    break
        if not samples:
            wrong.append(f"{name}: no sample could be compared")
        compared += samples
    return compared, wrong


def _samples(info: OpInfo) -> list[SampleInput]:
    dtype = next(one for one in (torch.float32, torch.int64, torch.complex64) if one in info.dtypes)
    gradients = info.supports_autograd and dtype != torch.int64
    generated = info.sample_inputs("cpu", dtype, requires_grad=gradients)
    return [sample for sample in islice(generated, SAMPLES) if not sample.kwargs.get("dropout_p")]


def _compare(info: OpInfo, sample: SampleInput) -> str | None:
    """Returns what is wrong, empty if nothing; None where the CPU itself fails, or torch has no such sample."""
    try:
        want = _run(info, sample.input, sample.args, sample.kwargs)
    except Exception:
        return None
    moved = tree_map(_to_device, (sample.input, sample.args, sample.kwargs))
    try:
        got = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, _run(info, *moved))
        torch.sim.synchronize()  # type: ignore[attr-defined]
        if info.name in NUMBERS_UNKNOWN:
            got, want = tree_map(lambda x: x.shape if isinstance(x, torch.Tensor) else x, (got, want))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True, check_stride=False)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def _to_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("sim").requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("sim")
    return value


def _run(info: OpInfo, first: Any, args: Any, kwargs: Any) -> Any:
    """Returns the results and, where there are any, the gradients of the inputs."""
    torch.manual_seed(0)
    if isinstance(first, torch.Tensor) and not first.requires_grad:
        first = first.clone()  # some operators write to it
    results = info(first, *args, **kwargs)
    floats = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
    inputs = [x for x in tree_leaves((first, args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients: list[torch.Tensor] = []
    if floats and inputs:
        total = functools.reduce(torch.add, [(x.abs() if x.is_complex() else x * x).sum() for x in floats])
        gradients = [g for g in torch.autograd.grad(total, inputs, allow_unused=True) if g is not None]
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, (results, gradients))
