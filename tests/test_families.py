"""What is found out about models of many families, as text: what a reordering of the code must leave as it is.

Of each family of `tests/splitting/models.py`: its Trace; its ShardingPlan for two ranks; the costs of its layers, whole
and of a rank of two, without what is measured; what a chunk stashes; and, for two meshes, the Strategy, the planner's
table and the memory model's peaks. One fact per line.

After a wanted change:  FOLD3D_WRITE_GOLDEN=1 python -m pytest tests/test_families.py, and read the difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import TreeSpec

from fold3d.errors import Fold3dError
from fold3d.placement.partition import split_ranges
from fold3d.plan.costs import ACTION_SECONDS, BUCKET_SECONDS, NetworkCosts, Profile
from fold3d.plan.job import TrainingJob
from fold3d.plan.search import decide
from fold3d.plan.strategy import Constraints
from fold3d.profile.layers import assumed_profile, profile_model
from fold3d.profile.shard import layers_of_a_shard, of_a_shard, with_tp_sync
from fold3d.profile.stashes import stashes_of
from fold3d.recompute import Recompute
from fold3d.splitting import plan_sharding
from fold3d.trace import Trace
from fold3d.trace.shadow import shared_shadows
from tests.splitting.models import FAMILIES, Tiny, build

GOLDEN = Path(__file__).parent / "golden" / "families"
NETWORK = NetworkCosts(pp_latency=1e-5, pp_bandwidth=1e9, dp_bandwidth=1e9, hop_latency=1e-5, tp_bandwidth=1e9)
FLOPS_PER_SECOND = 1e9
MEASURED = {"forward", "backward", "busy", "update_seconds", "host_update_seconds", "update_bytes", "optimizer_bytes"}
"""Of a Profile, what a clock or the process's memory says."""
WITH_WHOLE = {"olmo2": {"self_attn.*": "replicate"}}
"""By model type: `tp_plan` of a model that two ranks cannot share without."""


def facts(tiny: Tiny) -> Iterator[tuple[str, Any]]:
    """Yields what is found out about a model, each with a name. What is refused says so in the place of a value."""
    model, batch = tiny.model, tiny.batch
    trace = tiny.trace()
    yield "trace", trace
    whole = assumed_profile(model, trace, batch, flops_per_second=FLOPS_PER_SECOND)
    yield "profile", whole
    measured = profile_model(model, trace, batch, torch.device("cpu"), seconds=0.0)
    yield "measured", {name: value for name, value in plain(measured).items() if name not in MEASURED}
    yield "pp=2", said(lambda: dict(planned(trace, whole, dp=2, pp=2, tp=1)))
    yield "pp=2, stashes", said(lambda: stashes_of(model, trace, batch, split_ranges(trace, 2), 2, Recompute()))
    yield "tp=2", said(lambda: dict(of_two_ranks(tiny, trace, whole, None)))
    if tiny.model.config.model_type in WITH_WHOLE:
        yield "tp=2, told", dict(of_two_ranks(tiny, trace, whole, WITH_WHOLE[tiny.model.config.model_type]))


def of_two_ranks(
    tiny: Tiny, trace: Trace, whole: Profile, tp_plan: Mapping[str, str] | None
) -> Iterator[tuple[str, Any]]:
    """Yields what a rank of two that share the model has of it, costs, and is planned."""
    model, batch = tiny.model, tiny.batch
    sharding = plan_sharding(model, trace, batch, 2, tp_plan, sequence_parallel=True)
    yield "sharding", without_operators(json.loads(sharding.to_json()))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    shard = of_a_shard(whole, trace, sharding, shapes, layers_of_a_shard(model, trace, batch, sharding))
    shard = with_tp_sync(shard, model, trace, sharding, batch)
    yield "profile", shard
    yield "plan", said(lambda: dict(planned(trace.under(2), shard, dp=2, pp=1, tp=2)))


def without_operators(value: Any) -> Any:
    """Returns the value without the operators of blocks, which are torch's and other ones in each version of it."""
    if isinstance(value, dict):
        return {name: without_operators(one) for name, one in value.items() if name != "operators"}
    return [without_operators(one) for one in value] if isinstance(value, list) else value


def planned(trace: Trace, profile: Profile, *, dp: int, pp: int, tp: int) -> Iterator[tuple[str, Any]]:
    """Yields what the planner says of a mesh, with all the memory that it wants, then with less."""
    needed: int | None = None
    for share in (1.0, 0.7):
        job = TrainingJob(
            trace=trace, profile=profile, network=NETWORK, dp=dp, pp=pp, tp=tp, micro_batches=4,
            action_seconds=ACTION_SECONDS, bucket_seconds=BUCKET_SECONDS,
            memory_limit=None if needed is None else round(share * needed), pool_is_elsewhere=True,
        )  # fmt: skip
        found = decide(job, Constraints(), lambda: True)
        needed = found.memory_bytes
        yield f"{share:g} of memory", [str(found.strategy), *found.table.splitlines(), *map(plain, found.peaks)]


def said(call: Callable[[], Any]) -> Any:
    """Returns what the call returns, or the message with which it refuses."""
    try:
        return call()
    except Fold3dError as error:
        return f"{type(error).__name__}: {error}"


def plain(value: Any) -> Any:
    """Returns a value as JSON has it."""
    if is_dataclass(value) and not isinstance(value, TreeSpec):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value) if one.compare and one.repr}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def lines(name: str, value: Any) -> Iterator[str]:
    """Yields a line for each fact in a value of `plain`: objects by field, lists of objects by entry."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from lines(f"{name}: {key}", one)
    elif isinstance(value, list) and any(isinstance(one, (dict, str)) for one in value):
        for number, one in enumerate(value):
            yield f"{name} {number}: {json.dumps(one)}"
    else:
        yield f"{name}: {json.dumps(value)}"


@pytest.mark.gate(cases=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_found_out_stays_as_it_is(family: str) -> None:
    with shared_shadows():  # one copy answers all
        found = [line for name, value in facts(build(family)) for line in lines(name, plain(value))]
    path = GOLDEN / f"{family}.txt"
    if os.environ.get("FOLD3D_WRITE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(found) + "\n")
    assert path.read_text().splitlines() == found
