"""What can be said about recomputation, and what it means for each chunk."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fold3d import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.recompute import Choice, Recompute

NAMES = st.lists(
    st.sampled_from(("attn", "mlp.*", "self_attn", "0", "mlp.c_[fp]*", "*norm*")), min_size=1, unique=True
).map(lambda names: Choice(patterns=tuple(names)))
CHOICES = st.one_of(
    st.just(Choice()), st.just(Choice(full=True)), st.integers(1, 9).map(lambda every: Choice(every=every)), NAMES
)


@given(st.lists(CHOICES, min_size=1, max_size=6))
def test_text_says_it_all(choices: list[Choice]) -> None:
    value = Recompute(tuple(choices))
    assert Recompute.parse(str(value)) == value
    assert value.of_chunks(len(choices)) == tuple(choices)


def test_words() -> None:
    assert Recompute.parse(True) == Recompute.parse("full") == Recompute.parse("True")
    assert Recompute.parse(False) == Recompute.parse("none") == Recompute()
    assert Recompute.parse("blocks") == Recompute.parse("blocks:1") == Recompute((Choice(every=1),))
    assert Recompute.parse("self_attn, mlp").choices == (Choice(patterns=("self_attn", "mlp")),)
    assert Recompute.parse(False).nothing and not Recompute.parse("none/blocks").nothing


def test_chunks() -> None:
    some = Recompute.parse("full/none/blocks/full")
    assert some.without_graph(4) == [True, False, False, True]
    assert Recompute.parse("full").without_graph(3) == [True] * 3
    # Its backward follows its forward: it recomputes block by block.
    assert Recompute.parse("full").without_graph(1) == [False]
    with pytest.raises(ConfigError, match=r"said of 4 chunks, and the model is cut into 8 \(pp \* segments\)"):
        some.of_chunks(8)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2, r'recompute=2: must be "auto", "none", "full" \(whole chunks\)'),
        (None, "recompute=None: must be"),
        ("", "recompute='': '' names no module"),
        ("full,attn", "'full' names no module"),
        ("attn,,mlp", "'' names no module"),
        ("blocks:0", "'blocks:0' must say every how many blocks"),
        ("blocks:half", "'blocks:half' must say every how many blocks"),
        ("full/auto", "'auto' names no module"),
    ],
)
def test_what_cannot_be(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(recompute=value)
