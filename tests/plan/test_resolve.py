"""What is left for the planner to choose."""

from __future__ import annotations

from typing import Any

import pytest

from fold3d import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.resolve import check_buckets, fitted, followed, needs_planner, resolve_auto, unplanned
from fold3d.plan.search import search
from fold3d.plan.space.recompute import KNOB as RECOMPUTE
from fold3d.plan.strategy import Constraints, Strategy, given
from fold3d.schedule import generate
from tests.plan.jobs import make_job


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


GIVEN = Strategy(
    dp=2,
    pp=2,
    micro_batches=4,
    ranges=((0, 1), (1, 3), (3, 6), (6, 8)),
    schedule="fold",
    group_size=2,
    dp_sync="zero1",
    bucket_bytes=1 << 16,
    settings=(
        ("recompute", "blocks"),
        ("offload", "none"),
        ("offload_optimizer", "False"),
        ("dp_sync_dtype", "float32"),
        ("gradient_delay", "0"),
    ),
)


def test_a_strategy_is_followed_as_if_it_were_set_one_by_one() -> None:
    by_hand = {"dp": 2, "tp": 1, "pp": 2, "micro_batches": 4, "segments": 2, "schedule": "fold", "group_size": 2}
    by_hand |= {"dp_sync": "zero1", "bucket_bytes": 1 << 16, "recompute": "blocks", "offload": "none"}
    made = followed(ParallelConfig(strategy=str(GIVEN)))
    assert {name: getattr(made, name) for name in by_hand} == by_hand
    assert followed(made) == made == followed(ParallelConfig(strategy=str(GIVEN), pp=2, schedule="fold"))
    constraints = resolve_auto(made, 2)
    assert constraints.segments == 2 and not needs_planner(made, constraints, 2, limited=True)
    trace = make_job(layers=4).trace
    assert fitted(made, trace) == GIVEN
    assert followed(ParallelConfig(pp=2)) == ParallelConfig(pp=2) and fitted(ParallelConfig(), trace) is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pp": 4}, "pp=4 contradicts the strategy, which has 2"),
        ({"micro_batches": 8}, r"micro_batches=8 \(of the Trainer: gradient_accumulation_steps\) contradicts"),
        ({"dp_sync": "early"}, "dp_sync='early' contradicts the strategy, which has 'zero1'"),
        ({"recompute": "full"}, "recompute='full' contradicts the strategy, which has 'blocks'"),
        ({"gradient_delay": 1}, "gradient_delay=1 contradicts the strategy, which has 0"),
        ({"memory_limit": "1GB"}, "memory_limit=1000000000 has no effect with strategy"),
        ({"micro_batch_size": "auto"}, "micro_batch_size='auto' has no effect with strategy"),
        ({"parallel": "auto", "global_batch_size": 8}, "leave one of them out"),
    ],
)
def test_what_contradicts_a_strategy_is_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        followed(ParallelConfig(strategy=str(GIVEN), **settings))


def test_a_strategy_of_another_model_is_refused() -> None:
    config = followed(ParallelConfig(strategy=str(GIVEN)))
    with pytest.raises(
        ConfigError, match=r"blocks=0-1,1-3,3-6,6-8 are not this model's: .* but the model has 6 blocks"
    ):
        fitted(config, make_job(layers=3).trace)
    with pytest.raises(ConfigError, match="the strategy has 4 chunks, and the model has no blocks to cut at"):
        fitted(config, None)
    divided = followed(ParallelConfig(strategy=str(GIVEN), micro_batch_size=1, micro_batches=3))
    with pytest.raises(ConfigError, match="micro_batches=3 contradicts the strategy, which has micro_batches=4"):
        fitted(divided, make_job(layers=4).trace)
    job = make_job(layers=4, micro_batches=4)
    found = search(job, Constraints(segments=1, dp_sync="early", bucket_bytes=0)).strategy
    check_buckets(found, 0, 4)
    with pytest.raises(ConfigError, match="stage 0 has 3 buckets of gradients, and the strategy's dp_sync=early"):
        check_buckets(found, 0, 3)


def test_a_strategy_is_read_from_what_a_plan_prints(tmp_path: Any) -> None:
    path = tmp_path / "plan.txt"
    for content in (
        str(GIVEN),
        f"fits: 3 GB of 4 GB\nstrategy: {GIVEN}\n12 tokens/s\n",
        f'{{"strategy": "{GIVEN}", "flags": ""}}',
    ):
        path.write_text(content)
        assert given(str(path)) == given(f"strategy: {GIVEN}") == GIVEN
    for wrong in (str(tmp_path / "nothing"), "1f1b"):
        with pytest.raises(ConfigError, match="must be what `fold3d plan` prints behind 'strategy: ', or a file"):
            given(wrong)
    path.write_text("nothing of the kind")
    with pytest.raises(ConfigError, match="is not a strategy"):
        given(str(path))
