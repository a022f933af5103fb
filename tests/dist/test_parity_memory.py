"""Saving memory changes no number: recomputation in each form, with what leaves the device in each form, is to the bit
what is computed without, dropout on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fold3d import schedule as schedules
from fold3d.offload import Offload
from tests.dist.parity_cases import Case
from tests.dist.test_offload import Trained, train
from tests.helpers.ranks import RankPool

pytestmark = pytest.mark.dist

FORMS = {
    "none": ("activations", "activations:50%"),
    "full": ("none", "boundaries", "activations"),
    "blocks": ("none", "boundaries", "activations"),
    "blocks:2": ("none", "activations"),
    "attn,mlp": ("none", "activations"),
    "full/attn/blocks/none": ("none", "boundaries", "activations"),
}
"""Of recompute, each with the settings of offload that go with it. The last, chunk by chunk, is cut to the chunks there
are; names are those of a family's modules."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 4, "m": 5},
    "interleaved": {"pp": 2, "tp": 2, "segments": 2, "m": 4, "tp_overlap": "sub"},
    "aiao": {"dp": 2, "pp": 2, "segments": 2, "m": 3, "dp_sync": "early"},
    "gpipe": {"pp": 2, "tp": 2, "m": 4, "tp_overlap": "none", "sequence_parallel": True},
    "zb_h1": {"dp": 2, "pp": 2, "m": 6, "dp_sync": "zero1"},
}
"""Each with another small layout; all that the engine would else choose by its clock is said."""
PRECISIONS = ("float32", "bfloat16")
FAMILIES = {"gpt2-96": "attn", "llama-96": "self_attn"}
"""With what attention is called. Wide enough that the input of a block, 1,024 bytes and more, moves."""


def grid() -> Iterator[Case]:
    """Yields every schedule, form and precision; families cycle."""
    for schedule, (column, form), dtype in itertools.product(SCHEDULES, enumerate(FORMS), PRECISIONS):
        family = list(FAMILIES)[column % 2]
        case = Case(schedule=schedule, dtype=dtype, family=family, dropout=0.1, tied=False, **SCHEDULES[schedule])
        yield replace(case, recompute=form)


@functools.cache
def kept(ranks: RankPool, case: Case) -> list[Trained]:
    """Returns what every rank computes that keeps everything where it is."""
    return ranks.run(train, case.ranks, case)


def is_copied(case: Case, form: str) -> bool:
    """Whether some stash of the schedule is to leave. The first chunk's input is the batch, which stays; what ranks of
    a tensor-parallel group have summed is kept for its recomputation, and leaves."""
    leaves = Offload.read(case.offload)
    choices = form.split("/") * (1 if "/" in form else case.pp * case.segments)
    lowered = schedules.lower(
        schedules.generate(case.schedule, pp=case.pp, segments=case.segments, micro_batches=case.m),
        reduce=case.dp > 1,
        recompute=[choice == "full" for choice in choices],
        offload=[
            chunk > 0 or case.tp > 1 if choice == "full" else choice == "blocks" or leaves.what == "activations"
            for chunk, choice in enumerate(choices)
        ],
        offload_share=leaves.share,
    )
    return "OFFLOAD" in lowered.csv()


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.name)
def test_to_the_bit(ranks: RankPool, case: Case) -> None:
    expected = kept(ranks, replace(case, recompute="none"))
    text = str(case.recompute)
    form = "/".join(text.split("/")[: case.pp * case.segments])
    for offload in FORMS[text]:
        one = replace(case, offload=offload, recompute=form.replace("attn", FAMILIES[case.family]))
        found = ranks.run(train, case.ranks, one)
        for mine, wanted in zip(found, expected, strict=True):
            assert mine.losses == wanted.losses, one.name
            assert mine.digests == wanted.digests, one.name
        assert any(mine.moved > 0 for mine in found) == (offload != "none" and is_copied(one, form)), one.name
