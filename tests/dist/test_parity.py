"""Loss, gradient norm and parameters in every small layout are those of one process running the stock Trainer.

The reference of HuggingFace models is `transformers.Trainer.train()` on the same rows, with all replicas' micro-batches
as accumulation steps; of plain modules a loop in torch. Bounds: 1e-10 in fp64, 1e-5 in fp32. The losses of fp64 models
keep fp64 (`parity_jobs.causal_loss`), so the bound holds for the reported loss as well.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest

from tests.dist import parity_cases, parity_jobs
from tests.dist.parity_cases import CHOICES, FLAGS, Case, wanted
from tests.dist.parity_checks import TOLERANCE, assert_all_names, assert_equal, assert_ranks_agree, assert_same_bits
from tests.helpers import cuda, device
from tests.helpers.ranks import RankPool

GRID = parity_cases.grid()
EIGHT = parity_cases.eight()
DP_SYNCS = ("early", "zero1", "serial")
ROLES = ("1", "2", "pp-1", "pp", "2pp+1")

reference = functools.cache(parity_jobs.train_alone)
"""Result of one process; call with `case.alone()`, so that all layouts of one training share it."""


def check(pool: RankPool, case: Case) -> None:
    """Trains `case` on the ranks, in every way of DP.sync, and compares with one process."""
    if device.chosen() == "cuda":
        cuda.skip_unless_served(case.ranks)
    expected = reference(case.alone())
    if case.clip:
        assert min(expected.norms) > parity_jobs.MAX_NORM, "the case must clip"
    first = None
    for way, dp_sync in enumerate(DP_SYNCS if case.dp > 1 else ("auto",)):
        # Of early and zero1 one lets every step begin before the weights of the one before are complete.
        looks = {} if case.through == "trainer" else {"looks": way == (case.m + case.segments) % 2 or case.dp == 1}
        one = replace(case, dp_sync=dp_sync)
        results = pool.run(parity_jobs.train, case.ranks, one, timeout=150.0, **looks)
        assert_equal(results[0], expected, TOLERANCE[case.dtype])
        assert_all_names(results[0], parity_jobs.build(case))
        assert_ranks_agree(results, case)
        first = first or results[0]
        assert_same_bits(results[0], first)


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_grid(ranks: RankPool, case: Case) -> None:
    check(ranks, case)


@pytest.mark.parametrize("case", EIGHT, ids=lambda case: case.name)
def test_eight_ranks(ranks8: RankPool, case: Case) -> None:
    check(ranks8, case)


class TestGrid:
    """The grid itself: settings cycle, and no pair that matters may fall through."""

    shown = frozenset(pair for case in GRID for pair in wanted(case))

    def test_every_layout_with_every_m(self) -> None:
        pairs = [(case.layout, case.m) for case in GRID]
        assert len(pairs) == len(set(pairs))
        for layout in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4)):
            dp, pp, segments = layout
            if dp * pp <= 4 and pp * segments <= 8:
                assert {m for place, m in pairs if place == layout} == {1, 2, pp - 1, pp, 2 * pp + 1} - {0}
        assert any(case.segments == 3 for case in GRID)
        assert all(parity_cases.possible(case) for case in GRID + EIGHT)

    @pytest.mark.parametrize("flag", FLAGS)
    def test_flags_meet_every_layout_and_m(self, flag: str) -> None:
        for value in FLAGS[flag]:
            assert {case.layout for case in GRID if getattr(case, flag) == value} == set(parity_cases.layouts())
            assert {role for role in ROLES if ("m", role, flag, value) in self.shown} == set(ROLES)

    @pytest.mark.parametrize("choice", CHOICES)
    def test_choices_meet_every_size_they_fit(self, choice: str) -> None:
        fitting = set()
        for base, schedule in itertools.product(GRID, CHOICES["schedule"]):
            for value in CHOICES[choice]:
                plain = {"schedule": schedule, "transport": "auto", "family": "gpt2", "labels": "full"}
                case = replace(base, group_size=None, through="engine", **(plain | {choice: value}))
                if parity_cases.possible(case):
                    fitting |= {pair for pair in wanted(case) if choice in pair}
        assert fitting - self.shown == set()
        assert {value for *_, name, value in fitting if name == choice} == set(CHOICES[choice])

    def test_group_sizes_and_trainer(self) -> None:
        folds = {case.group_size == case.m for case in GRID if case.schedule == "fold" and case.group_size}
        assert folds == {True, False}
        assert len({case.layout for case in GRID if case.through == "trainer"}) >= 8
