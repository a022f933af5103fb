"""PTD-P's takeaways on the paper's ten models (table 1 of the paper, 4.1 of the dissertation)."""

from __future__ import annotations

import pytest

from fold3d.errors import ConfigError
from fold3d.rivals import Transformer, ptd_p

TABLE = [
    # parameters (billion), heads, hidden, layers, t, p, GPUs, batch, teraFLOP/s per GPU
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]


def even(b: int) -> float:
    return float(b)


@pytest.mark.parametrize("billions, heads, hidden, layers, t, p, gpus, batch, teraflops", TABLE)
def test_the_papers_models(
    billions: float, heads: int, hidden: int, layers: int, t: int, p: int, gpus: int, batch: int, teraflops: int
) -> None:
    model = Transformer(layers=layers, hidden=hidden, heads=heads)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    plan = ptd_p(model, gpus=gpus, gpus_per_host=8, memory_bytes=80e9, batch=batch, seconds=even)
    assert plan.t <= 8 and plan.t * plan.p * plan.d == gpus and batch % (plan.d * plan.b) == 0
    assert 1 / 2 <= plan.t * plan.p / (t * p) <= 2
    assert plan.memory_bytes <= 80e9
    # What the paper chose fits as well, with more room.
    assert model.memory(t=t, p=p, b=1) <= plan.memory_bytes


def test_flops_of_a_step() -> None:
    """GPT-3 with 1,536 samples: what 1,024 GPUs compute at 140 teraFLOP/s in 32 seconds (section 5.1)."""
    gpt3 = Transformer(layers=96, hidden=12288, heads=96)
    assert gpt3.parameters == pytest.approx(174.6e9, rel=1e-3)
    assert gpt3.flops(1536) / (1024 * 140e12) == pytest.approx(31.47, rel=1e-3)


def test_the_takeaways_in_their_order() -> None:
    model = Transformer(layers=24, hidden=2048, heads=16)
    found = {}
    for memory in (100e9, 16e9, 9e9, 3e9):
        plan = ptd_p(model, gpus=32, gpus_per_host=4, memory_bytes=memory, batch=64, seconds=even)
        found[memory] = plan.t, plan.p
        least = model.memory(t=plan.t, p=plan.p, b=1)
        assert least <= memory
    assert found[100e9] == (1, 1) and found[16e9] == (2, 1) and found[9e9] == (4, 1)
    assert found[3e9][0] == 4 and found[3e9][1] > 1  # only then across hosts


@pytest.mark.parametrize("overhead", [0.0, 0.5, 4.0, 100.0])
def test_the_micro_batch_has_the_least_of_equation_1(overhead: float) -> None:
    model = Transformer(layers=24, hidden=2048, heads=16)

    def seconds(b: int) -> float:
        return overhead + b

    plan = ptd_p(model, gpus=16, gpus_per_host=2, memory_bytes=12e9, batch=64, seconds=seconds)
    assert plan.p > 1
    of_replica = 64 // plan.d
    times = {
        b: (of_replica / b + plan.p - 1) * seconds(b)
        for b in range(1, of_replica + 1)
        if of_replica % b == 0 and model.memory(t=plan.t, p=plan.p, b=b) <= 12e9
    }
    assert times[plan.b] == min(times.values())
    if overhead == 0.0:
        assert plan.b == 1  # where small micro-batches cost nothing


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="PTD-P has no t and p for 2 GPUs"):
        ptd_p(
            Transformer(layers=24, hidden=2048, heads=16),
            gpus=2,
            gpus_per_host=2,
            memory_bytes=1e9,
            batch=8,
            seconds=even,
        )
