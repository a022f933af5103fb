"""Which mesh parallel="auto" takes, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from fold3d import Engine, ParallelConfig
from fold3d.engine.planning import mesh
from fold3d.engine.planning.mesh import Asked, Decision, decide_mesh
from fold3d.errors import ConfigError, MemoryLimitError
from fold3d.plan.job import HostLink, Hosts
from fold3d.profile.layers import assumed_profile
from fold3d.trace import trace
from tests.helpers import models

GBIT = 1e9 / 8


def asked(**settings: Any) -> Asked:
    model = models.build(models.MODELS["gpt2"](layers=4), dtype=torch.float32, device="meta")
    config = ParallelConfig(parallel="auto", **({"global_batch_size": 16} | settings))
    example = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "labels": torch.zeros(4, 8, dtype=torch.long)}
    return Asked(model=model, config=config, example=example, samples=4, device=torch.device("cpu"))


def decided(job: Asked, world: int, link: HostLink, per_host: int = 1, limit: int | None = None) -> Decision:
    """Returns what rank 0 chooses for devices of 1 GFLOP/s."""
    recording = trace(job.model, example=job.example)
    profile = assumed_profile(job.model, recording, job.example, flops_per_second=1e9)
    hosts = Hosts(per_host=per_host, between=link, within=HostLink(100 * GBIT, 1e-6))
    options = mesh._options(job, world, per_host, stages=4)
    jobs = mesh._Jobs(job, recording, profile, None, hosts, limit)
    return mesh._best(job, jobs, options, limit)[0]


def test_a_slow_network_asks_for_stages_and_a_fast_one_for_replicas() -> None:
    fast = decided(asked(), 4, HostLink(100 * GBIT, 1e-6))
    assert (fast.dp, fast.pp, fast.samples * fast.micro_batches) == (4, 1, 4)
    slow = decided(asked(), 4, HostLink(1e-3 * GBIT, 1e-6))
    assert slow.pp > 1 and slow.dp * slow.micro_batches * slow.samples == 16


def test_what_is_set_stays() -> None:
    for settings in ({"pp": 2}, {"dp": 2}, {"tp": 2}, {"dp": 1, "tp": 1}):
        found = decided(asked(**settings), 4, HostLink(GBIT, 1e-5), per_host=4)
        assert found.world == 4 and all(getattr(found, axis) == size for axis, size in settings.items())


def test_memory_is_kept_to() -> None:
    free = decided(asked(), 2, HostLink(100 * GBIT, 1e-6))
    assert free.dp == 2
    whole = sum(parameter.numel() for parameter in asked().model.parameters())
    short = decided(asked(recompute="none"), 2, HostLink(100 * GBIT, 1e-6), limit=12 * whole)  # of 16 bytes each
    assert short.pp == 2 or short.samples < free.samples
    with pytest.raises(MemoryLimitError, match="no mesh fits, the least"):
        decided(asked(memory_limit=1000), 2, HostLink(GBIT, 1e-6), limit=1000)


def test_a_setting_that_a_mesh_cannot_have_leaves_it_out() -> None:
    found = decided(asked(dp_sync="zero1"), 2, HostLink(1e-3 * GBIT, 1e-6))
    assert found.dp == 2  # with one replica nothing is summed
    with pytest.raises(ConfigError, match="dp_sync='zero1' has no effect with one replica"):
        decided(asked(dp_sync="zero1", pp=2), 2, HostLink(GBIT, 1e-6))
    with pytest.raises(ConfigError, match="divided by no dp"):
        decided(asked(global_batch_size=3, pp=1, tp=1), 2, HostLink(GBIT, 1e-6))


@pytest.mark.parametrize(
    ("hosts", "expected"), [(["a"], 1), (["a"] * 4, 4), (["a", "a", "b", "b"], 2), (["a", "b", "a", "b"], 1)]
)
def test_processes_of_a_host(hosts: list[str], expected: int) -> None:
    assert mesh._per_host(hosts) == expected


def test_uneven_hosts_are_taken_one_by_one() -> None:
    assert mesh._per_host(["a", "a", "b"]) == mesh._per_host(["a", "a", "b", "b", "b", "b"]) == 1


def test_a_kept_decision_is_for_the_same_job() -> None:
    made = Decision(dp=2, tp=1, pp=2, micro_batches=4, samples=2, parameters=7)
    assert Decision.of(made.to_dict()) == made and Decision.of({"dp": 2}) is None and Decision.of(None) is None
    config = asked().config
    assert made.answers(config, 4, 7, 4)
    for other in (made.answers(config, 8, 7, 4), made.answers(config, 4, 8, 4), made.answers(config, 4, 7, 1)):
        assert not other
    assert not made.answers(replace(config, global_batch_size=32), 4, 7, 4)
    assert not made.answers(replace(config, pp=1), 4, 7, 4) and made.answers(replace(config, pp=2), 4, 7, 4)


def test_one_process_decides_how_many_samples_pass_at_once() -> None:
    found = decide_mesh(asked())
    assert found.world == 1 and found.micro_batches * found.samples == 16
    kept = replace(found, samples=2, micro_batches=8)
    assert decide_mesh(asked(), kept) == kept
    assert decide_mesh(asked(), replace(kept, parameters=1)).parameters == found.parameters


def test_an_engine_decides() -> None:
    torch.manual_seed(0)
    model = models.build(models.MODELS["gpt2"](layers=2), dtype=torch.float64, device="cpu")
    ids = torch.randint(2, models.VOCABULARY, (8, 8))
    batch: Mapping[str, Any] = {"input_ids": ids, "labels": ids}
    example = {name: value[:2] for name, value in batch.items()}
    config = ParallelConfig(parallel="auto", global_batch_size=8, segments=1)
    engine = Engine(model, config, optimizer=lambda of: torch.optim.SGD(of, lr=0.1), example=example)
    assert engine.config.parallel is None and engine.config.dp == engine.config.tp == engine.config.pp == 1
    assert engine.config.micro_batches in (4, 8)
    expected = model(**batch).loss.item()
    assert engine.step(dict(batch)).loss == pytest.approx(expected, abs=1e-10)
    engine.close()


def test_layouts() -> None:
    assert (ParallelConfig().tp, ParallelConfig().pp) == (1, 1)
    made: Callable[..., ParallelConfig] = ParallelConfig
    assert made(parallel="auto", global_batch_size=8, pp=2).pp == 2
    for settings, message in (
        ({"parallel": "auto", "global_batch_size": 8, "micro_batches": 2}, "micro_batches=2 follows from"),
        ({"global_batch_size": 8}, "global_batch_size=8 has no effect on an engine"),
        ({"parallel": "auto", "global_batch_size": 8, "pp": 0}, "pp=0: must be an integer of at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(**settings)
