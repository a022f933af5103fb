"""Plans made in this process, by what decides them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fold3d.sharding.plan import ShardingPlan
from fold3d.trace.model_trace import Trace

_MOST = 16


def remembered(
    decided_by: tuple[nn.Module, Trace, Mapping[str, Any], int, Mapping[str, str] | None, bool],
    make: Callable[[], ShardingPlan],
) -> ShardingPlan:
    """Returns the plan made before from the like of `decided_by`, or what `make` returns."""
    key = _key(*decided_by)
    plans = _plans()
    if key not in plans:
        plan = make()
        while len(plans) >= _MOST:
            del plans[next(iter(plans))]
        plans[key] = plan
    return plans[key]


@cache
def _plans() -> dict[str, ShardingPlan]:
    return {}


def _key(
    model: nn.Module,
    trace: Trace,
    example: Mapping[str, Any],
    tp: int,
    overrides: Mapping[str, str] | None,
    sequence_parallel: bool,
) -> str:
    """Returns a hash of the model's modules with their shapes and numbers, its configuration and how it is called."""
    text = hashlib.blake2b(digest_size=16)

    def add(*parts: Any) -> None:
        text.update(repr(parts).encode())

    for name, module in model.named_modules():
        add(name, type(module).__module__, type(module).__qualname__)
        add([(key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters(recurse=False)])
        # A configuration's to_dict does not say how attention is computed.
        add(_plain(module), _plain(getattr(module, "config", None)))
    config: Any = getattr(model, "config", None)
    add(str(config.to_dict()) if hasattr(config, "to_dict") else "")
    leaves, spec = tree_flatten(dict(example))
    add(str(spec), [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves])
    add(trace.blocks, trace.form, trace.tied, trace.direct, trace.leaks, trace.modified)
    add(tp, sorted((overrides or {}).items()), sequence_parallel)
    return text.hexdigest()


def _plain(value: Any) -> list[tuple[str, Any]]:
    """Returns the attributes of an object that are numbers and texts."""
    found = getattr(value, "__dict__", {})
    return sorted((key, one) for key, one in found.items() if type(one) in (int, bool, float, str))
