"""Liger's element-wise kernels in a recording: Triton needs memory, so what they compute is said by torch's operations.

Shapes, dtypes and what reads what are those of the kernels; values there are none. Their fused losses are not here:
they read the head's weight, which is another rank's (see `chunked_loss`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional


def _scaled(x: Tensor, weight: Tensor | None, *_: Any) -> Tensor:
    return x.clone() if weight is None else (x * weight).to(x.dtype)


def _rotated(query: Tensor, key: Tensor, cos: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    read = 0 * cos.sum().to(query.dtype)
    return query + read, key + read


_INSTEAD: Mapping[str, Callable[..., Any]] = {
    "LigerRMSNormFunction": _scaled,
    "LigerLayerNormFunction": lambda x, weight, bias, *_: _scaled(x, weight) + bias,
    "LigerSiLUMulFunction": lambda gate, up, *_: functional.silu(gate) * up,
    "LigerGELUMulFunction": lambda gate, up, *_: functional.gelu(gate) * up,
    "LigerRopeFunction": _rotated,
}
"""Class of `liger_kernel.ops` -> the like of what its `apply` computes."""


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """In its body Liger's functions, where they are imported, run no kernel."""
    ops = sys.modules.get("liger_kernel.ops")
    found = [(getattr(ops, name, None), instead) for name, instead in _INSTEAD.items()]
    patched: list[Any] = []
    for kind, instead in found:
        if kind is not None and "apply" not in vars(kind):
            kind.apply = staticmethod(instead)
            patched.append(kind)
    try:
        yield
    finally:
        for kind in patched:
            del kind.apply
