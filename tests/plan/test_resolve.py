"""What is left for the planner to choose."""

from __future__ import annotations

from typing import Any

import pytest

from fold3d import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.resolve import needs_planner, resolve_auto, unplanned
from fold3d.plan.space.recompute import KNOB as RECOMPUTE
from fold3d.schedule import generate


@pytest.mark.parametrize(
    ("settings", "dp", "segments", "planned"),
    [
        ({"pp": 2}, 2, None, True),
        ({"pp": 1}, 2, None, True),
        ({"pp": 1}, 1, 1, False),
        ({"pp": 2, "segments": 3}, 2, 3, False),
        ({"pp": 2, "schedule": "1f1b"}, 2, 1, False),
        ({"pp": 2, "schedule": "aiao"}, 2, None, True),
        ({"pp": 2, "segments": 3, "memory_limit": 1000}, 2, 3, True),
        ({"pp": 2, "segments": 3, "memory_limit": 1000}, 1, 3, True),
        ({"pp": 2, "segments": 3, "schedule": "aiao", "memory_limit": 1000}, 2, 3, True),
        ({"pp": 2, "segments": 3, "dp_sync": "early", "memory_limit": 1000}, 2, 3, True),
        ({"pp": 2, "schedule": "1f1b", "memory_limit": 1000}, 2, 1, True),
        ({"pp": 2, "segments": 3, "schedule": "fold", "memory_limit": 1000}, 1, 3, True),
    ],
)
def test_what_is_planned(settings: dict[str, Any], dp: int, segments: int | None, planned: bool) -> None:
    config = ParallelConfig(**settings)
    constraints = resolve_auto(config, dp)
    asked = needs_planner(config, constraints, dp, limited="memory_limit" in settings)
    assert (constraints.segments, asked) == (segments, planned)


def test_a_schedule_of_one_s_own_says_how_often_it_folds(tmp_path: Any) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(generate("aiao", pp=2, segments=3, micro_batches=2).csv())
    config = ParallelConfig(pp=2, micro_batches=2, schedule=str(path), memory_limit=1 << 30)
    constraints = resolve_auto(config, 2)
    assert constraints.segments == 3 and needs_planner(config, constraints, 2, limited=True)


@pytest.mark.parametrize(
    ("settings", "dp"),
    [
        ({"pp": 1}, 1),
        ({"pp": 2, "segments": 2, "schedule": "aiao"}, 1),
        ({"pp": 2, "segments": 2, "schedule": "aiao", "dp_sync": "early"}, 2),
    ],
)
def test_a_memory_limit_needs_something_to_choose(settings: dict[str, Any], dp: int) -> None:
    why = "memory_limit=5000 has no effect: everything that memory depends on is set"
    with pytest.raises(ConfigError, match=why):
        resolve_auto(ParallelConfig(memory_limit=5000, recompute="none", offload="none", **settings), dp)
    for name in ("recompute", "offload"):
        both = {"recompute": "none", "offload": "none", name: "auto"}
        config = ParallelConfig(memory_limit=5000, **both, **settings)
        assert needs_planner(config, resolve_auto(config, dp), dp, limited=True)
    sized = ParallelConfig(memory_limit=5000, recompute="none", offload="none", micro_batch_size="auto", **settings)
    assert needs_planner(sized, resolve_auto(sized, dp), dp, limited=True) and sized.part_size is None


def test_sizes_of_parts_alone_ask_nobody_to_plan() -> None:
    config = ParallelConfig(segments=1, micro_batch_size="auto")
    assert not needs_planner(config, resolve_auto(config, 1), 1, limited=False)
    assert ParallelConfig(micro_batch_size=3).part_size == 3


def test_without_the_planner_what_is_free_has_its_default() -> None:
    config = ParallelConfig(pp=2, segments=2, micro_batches=4, recompute=True)
    made = unplanned(config, resolve_auto(config, 1), 1, ((0, 1), (1, 2), (2, 3), (3, 4)))
    assert (made.schedule, made.dp_sync, made.bucket_bytes) == ("aiao", "early", 1 << 20)
    assert str(RECOMPUTE.of(made)) == "full" and made.segments == 2
    config = ParallelConfig(pp=2, segments=1, dp_sync="zero1", bucket_bytes="4MiB")
    made = unplanned(config, resolve_auto(config, 2), 2, ((0, 2), (2, 4)))
    assert (made.schedule, made.dp_sync, made.bucket_bytes) == ("1f1b", "zero1", 4 << 20)
    assert RECOMPUTE.of(made).nothing
