"""What parts of micro-batches cost, and of how many samples they are best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fold3d.errors import ConfigError
from fold3d.plan.costs import LayerBytes, TpExchange
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory_options import cheapest_changes
from fold3d.plan.micro_batch_size import in_parts, remark_on, search_sizes, sizes_of
from fold3d.plan.proposal import Proposal
from fold3d.plan.search import decide, search
from fold3d.plan.strategy import Constraints
from tests.plan.jobs import make_job

MB = 1 << 20


def sampled(samples: int = 8, *, seconds: float = 0.0, **changes) -> TrainingJob:
    """Returns a job whose layers need so many seconds for one sample, beside what follows the samples."""
    job = make_job(dp=1, layers=8, micro_batches=2, activation_bytes=8 * MB, bandwidth=1e10, **changes)
    kept = tuple(
        LayerBytes(saved=4 * of.saved, forward=4 * of.forward, backward=4 * of.backward) for of in job.profile.layers
    )
    whole = replace(job.profile, layers=kept)

    def one(times):
        return tuple(time / samples + seconds for time in times)

    layers = tuple(
        LayerBytes(saved=of.saved // samples, forward=of.forward // samples, backward=of.backward // samples)
        for of in whole.layers
    )
    sizes = tuple(size // samples for size in whole.activation_bytes)
    least = replace(
        whole, forward=one(whole.forward), backward=one(whole.backward), layers=layers, activation_bytes=sizes
    )
    return replace(job, profile=whole, samples=samples, one_sample=least)


def test_a_part_costs_what_lies_on_the_line_through_one_sample_and_all():
    job = sampled(8, seconds=7e-3)
    part, whole, one = in_parts(job, 2), job.profile, job.one_sample
    assert part.samples == 2 and part.micro_batches == 4 * job.micro_batches
    for name in ("forward", "backward"):
        ends = zip(getattr(one, name), getattr(whole, name), getattr(part.profile, name), strict=True)
        for first, last, found in ends:
            assert found == pytest.approx(first + (last - first) / 7)
    assert part.profile.activation_bytes == (2 * MB,) * 16
    assert part.profile.layers[1].saved == 8 * MB
    assert part.profile.gradient_bytes == whole.gradient_bytes
    assert in_parts(job, 8) is job and in_parts(job, 1).profile.forward == one.forward
    assert in_parts(part, 1).profile.layers == in_parts(job, 1).profile.layers
    with pytest.raises(ValueError, match="parts of 9 samples of micro-batches of 8"):
        in_parts(job, 9)


def test_what_was_not_measured_is_in_proportion():
    job = sampled(8, seconds=7e-3)
    for unknown in (
        replace(job, one_sample=None),
        replace(job, profile=replace(job.profile, measured=False)),
    ):
        found = in_parts(unknown, 2).profile
        assert found.forward == pytest.approx([time / 4 for time in job.profile.forward])
        assert found.layers[1].saved == 8 * MB


def test_sums_over_shards_and_their_halves_follow():
    job = sampled(8)
    exchanges = tuple((TpExchange(800, trips=1, follows=True),) for _ in job.profile.forward)
    whole = replace(job.profile, tp_forward=exchanges, halves_factor=1.25, sub_micro_batches=3)
    job = replace(job, profile=whole, one_sample=None)
    two, one = in_parts(job, 2).profile, in_parts(job, 1).profile
    assert two.tp_forward[0] == (TpExchange(200, trips=1, follows=True),)
    assert (two.halves_factor, two.sub_micro_batches) == (1.25, 2)
    assert one.halves_factor is None


@pytest.mark.parametrize(
    ("samples", "most", "expected"),
    [(1, None, [1]), (8, None, [8, 4, 2, 1]), (12, None, [12, 6, 4, 2, 1]), (7, None, [7, 1]), (4096, 4, [4, 2, 1])],
)
def test_sizes_are_divisors(samples: int, most: int | None, expected: list[int]) -> None:
    assert sizes_of(samples, most) == expected


def found_with(job: TrainingJob, constraints: Constraints = Constraints()) -> list:  # noqa: B008
    def plan(size: int) -> tuple[TrainingJob, Proposal]:
        made = in_parts(job, size)
        return made, decide(made, constraints, lambda: True)

    return search_sizes(sizes_of(job.samples), plan)


FIXED = Constraints(segments=1, schedule="1f1b", settings=(("recompute", "none"), ("offload", "none")))


def test_micro_batches_are_divided_as_little_as_it_takes_where_small_kernels_cost():
    roomy = found_with(sampled(seconds=0.03), FIXED)
    assert roomy[0].size == 8
    needs = {one.size: one.proposal.memory_bytes for one in roomy}
    short = found_with(sampled(seconds=0.03, memory_limit=(needs[8] + needs[4]) // 2), FIXED)
    assert short[0].size == 4 and short[0].fits
    assert short[0].proposal.strategy.micro_batches == 4
    text = remark_on(short, 8, measured=True)
    assert text.startswith("micro_batch_size=4 of 8 samples, 2 parts: ")
    assert "8: " in text and "does not fit" in text and "proportion" not in text
    assert "were not measured" not in text and remark_on(short, 8, measured=False).endswith("was not measured")


def test_dividing_is_weighed_against_computing_again():
    """Where small parts cost little they are taken, and where they cost much, blocks recompute."""
    free = Constraints(segments=1, schedule="1f1b")
    least = search(in_parts(sampled(), 4), replace(free, settings=FIXED.settings)).memory_bytes
    cheap = found_with(sampled(memory_limit=least), free)[0]
    assert cheap.size < 8 and "recompute" not in cheap.proposal.flags
    dear = found_with(sampled(seconds=0.5, memory_limit=least), free)[0]
    assert dear.size == 8 and dear.fits and "--recompute" in dear.proposal.flags


def test_where_nothing_fits_the_least_is_told():
    found = found_with(sampled(memory_limit=1000), FIXED)
    assert found[0].size == 1 and not found[0].fits
    assert [one.proposal.memory_bytes for one in found] == sorted(one.proposal.memory_bytes for one in found)


def test_sizes_that_cannot_be_are_passed_over():
    job = sampled()

    def plan_of(bad: Callable[[int], bool]) -> Callable[[int], tuple[TrainingJob, Proposal]]:
        def plan(size: int) -> tuple[TrainingJob, Proposal]:
            if bad(size):
                raise ConfigError(f"no schedule with {size}")
            return in_parts(job, size), search(in_parts(job, size), FIXED)

        return plan

    assert [one.size for one in search_sizes([8, 4], plan_of(lambda size: size == 8))] == [4]
    with pytest.raises(ConfigError, match="no schedule with 8"):
        search_sizes([8, 4], plan_of(lambda size: True))


def test_a_smaller_size_is_among_the_changes_that_need_less():
    job = sampled(seconds=1e-4)
    strategy = search(job, FIXED).strategy
    assert "micro_batch_size=4" in [one.setting for one in cheapest_changes(job, strategy, 9)]
    of_one = in_parts(job, 1)
    assert not any("micro_batch" in one.setting for one in cheapest_changes(of_one, search(of_one, FIXED).strategy, 9))
    unknown = replace(job, samples=None, one_sample=None)
    assert any("half the size" in one.setting for one in cheapest_changes(unknown, strategy, 9))
