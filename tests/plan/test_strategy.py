"""Strategy: its text form, what it refuses, and that ranks notice another one."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fold3d.config import DP_SYNC
from fold3d.errors import ConfigError
from fold3d.plan.strategy import MIXED, Strategy, parse

PLAIN = Strategy(dp=2, pp=2, micro_batches=4, ranges=((0, 3), (3, 6)), schedule="1f1b")


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    pp, segments = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 9), min_size=pp * segments, max_size=pp * segments))
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    dp_sync = draw(st.sampled_from((*DP_SYNC, MIXED)))
    way = st.lists(st.sampled_from(("early", "zero1")), max_size=6).map(tuple)
    ways = st.lists(way, min_size=pp, max_size=pp).filter(lambda found: len(set().union(*found)) > 1)
    numbers = st.permutations(range(draw(st.integers(0, 5)))).map(tuple)
    stages = {"min_size": pp, "max_size": pp}
    return Strategy(
        dp=draw(st.integers(1, 4)),
        pp=pp,
        micro_batches=draw(st.integers(1, 64)),
        ranges=tuple(zip([0, *ends], ends, strict=False)),
        schedule=draw(st.one_of(st.just("aiao"), st.text(st.characters(exclude_categories=("Cs",)), min_size=1))),
        group_size=draw(st.one_of(st.none(), st.integers(1, 64))),
        dp_sync=dp_sync,
        modes=tuple(draw(ways)) if dp_sync == MIXED else (),
        gather_order=draw(st.one_of(st.just(()), st.lists(numbers, **stages).map(tuple))),
        bucket_bytes=draw(st.integers(0, 1 << 50)),
        settings=draw(
            st.sampled_from(((), (("recompute", "full/none"),), (("recompute", "False"), ("path", "a b='c'"))))
        ),
    )


@given(strategies())
def test_the_text_form_says_everything(strategy: Strategy) -> None:
    assert parse(str(strategy)) == strategy


def test_the_text_form_can_be_read() -> None:
    folded = Strategy(
        dp=2,
        pp=2,
        micro_batches=8,
        ranges=((0, 2), (2, 4), (4, 6), (6, 8)),
        schedule="fold",
        group_size=4,
        dp_sync=MIXED,
        modes=(("early", "early", "zero1"), ("early",) * 3),
        gather_order=((1, 0), (2, 1, 0)),
        settings=(("recompute", "True"),),
    )
    assert str(folded) == (
        "dp=2 pp=2 micro_batches=8 segments=2 blocks=0-2,2-4/4-6,6-8 schedule=fold group_size=4 "
        "'dp_sync=early*2,zero1*1/early*3' gather_order=1,0/2,1,0 bucket_bytes=1048576 recompute=True"
    )
    assert folded.name == "2 segments, fold, N=4, DP.sync mixed"
    assert len(shlex.split(str(replace(PLAIN, schedule="my own/order.csv")))) == len(str(PLAIN).split())


def test_what_is_not_said_is_the_forward_order() -> None:
    assert PLAIN.modes_of(1, 3) == ("early",) * 3 and PLAIN.gathers_of(1, 3) == (0, 1, 2)
    assert replace(PLAIN, dp_sync="zero1").gathers_of(0, 3) == ()
    assert replace(PLAIN, gather_order=((1, 0), (0, 1))).gathers_of(0, 2) == (1, 0)
    mixed = replace(PLAIN, dp_sync=MIXED, modes=(("zero1", "early"), ("early", "zero1")))
    assert [mixed.gathers_of(stage, 2) for stage in (0, 1)] == [(1,), (0,)]


def test_another_strategy_has_another_digest() -> None:
    others = [
        replace(PLAIN, dp=3),
        replace(PLAIN, ranges=((0, 2), (2, 6))),
        replace(PLAIN, schedule="gpipe"),
        replace(PLAIN, gather_order=((0, 1), (1, 0))),
        replace(PLAIN, bucket_bytes=0),
        replace(PLAIN, settings=(("recompute", "True"),)),
    ]
    assert len({str(PLAIN), *map(str, others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "words of the form name=value"),
        ("dp=2", "blocks is missing"),
        (str(PLAIN).replace("pp=2", "pp=two"), "invalid literal"),
        (str(PLAIN).replace("segments=1", "segments=2"), "segments=2, but blocks has 2 chunks for pp=2"),
        (str(PLAIN).replace("pp=2", "pp=3"), "2 chunks cannot be spread over pp=3 stages"),
        (str(PLAIN).replace("early", "lazy"), "dp_sync='lazy'"),
        (str(PLAIN) + " gather_order=0", "gather_order is for 1 stages, and there are 2"),
        (str(PLAIN).replace("pp=2", "pp=0"), "pp=0: must be at least 1"),
        (str(PLAIN).replace("3-6", "4-6"), "begins where the one before it ends"),
        (str(PLAIN).replace("dp_sync=early", "'dp_sync=early*1/zro1*1'"), "'early' or 'zero1'"),
        (str(PLAIN).replace("dp_sync=early", "'dp_sync=early*1/zero1*99999999999'"), "99999999999 buckets, more than"),
        (str(PLAIN).replace("bucket", "gather_order=0,0/1 bucket"), "each of its buckets once"),
        (str(PLAIN).replace("micro_batches=4", "micro_batches=4 micro_batches=8"), "'micro_batches=4' is not what"),
        (str(PLAIN).replace("dp_sync", "grop_size=2 dp_sync"), "'grop_size=2' is not what stands there"),
        (str(PLAIN).replace("micro_batches=4", "micro_batches=+4"), "'micro_batches=\\+4' is not what"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


@given(strategies(), st.integers(0, 400), st.integers(0, 2), st.characters(exclude_categories=("Cs",)))
def test_damaged_text_is_refused_or_read_as_it_stands(strategy: Strategy, at: int, cut: int, put: str) -> None:
    """A character in the wrong place is no other error, and no word is passed over."""
    text = str(strategy)
    damaged = text[:at] + put + text[at + cut :]
    try:
        found = parse(damaged)
    except ConfigError:
        return
    assert shlex.split(str(found)) == shlex.split(damaged)
