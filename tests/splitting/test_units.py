"""Units: what an atom reaches belongs together with it, however far that goes on."""

from __future__ import annotations

import random

import pytest
import torch

from fold3d.splitting.probe import Atom
from fold3d.splitting.regions import Mixed, find_units


def _atom(first: int, end: int, **sinks: list[int]) -> Atom:
    return Atom(first, end, {name: torch.tensor(at) for name, at in sinks.items()}, frozenset())


def test_heads_that_share_keys() -> None:
    queries = [_atom(16 * k, 16 * k + 16, out=[2 * k, 2 * k + 1]) for k in range(4)]
    keys = [_atom(0, 16, out=[0, 1, 2, 3]), _atom(16, 32, out=[4, 5, 6, 7])]
    units = find_units({"out": 8}, {"queries": queries, "keys": keys}, {})
    assert units.count == 2
    assert units.rows["out"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert units.columns == {"queries": [0, 0, 1, 1], "keys": [0, 1]}


def test_units_are_numbered_by_their_first_channel() -> None:
    units = find_units(
        {"one": 2, "other": 2}, {"in": [_atom(0, 1, one=[1], other=[0]), _atom(1, 2, one=[0], other=[1])]}, {}
    )
    assert units.rows["one"].tolist() == [0, 1]
    assert units.rows["other"].tolist() == [1, 0]
    assert units.columns == {"in": [1, 0]}


def test_a_chain_is_one_unit_in_whatever_order_it_is_joined() -> None:
    links = [(k, k + 1) for k in range(999)]
    random.Random(0).shuffle(links)
    atoms = [_atom(k, k + 1, out=list(link)) for k, link in enumerate(links)]
    units = find_units({"out": 1000}, {"in": atoms}, {})
    assert units.count == 1
    assert not units.rows["out"].any()


def test_what_is_left_out_joins_nothing() -> None:
    atoms = [_atom(0, 1, out=[0]), _atom(1, 2, out=[1]), _atom(2, 4, out=[0, 1])]
    units = find_units({"out": 2}, {"in": atoms}, {"in": frozenset({2})})
    assert units.count == 2
    assert units.columns == {"in": [0, 1, -1]}


@pytest.mark.parametrize(
    ("rows", "atoms", "message"),
    [
        ({"out": 2}, [_atom(0, 3, out=[0, 1]), _atom(3, 4)], "output channel 3 of in is not read"),
        ({"out": 3}, [_atom(0, 1, out=[0]), _atom(1, 2, out=[2])], "input channel 1 of out comes from elsewhere"),
        ({"out": 3}, [_atom(0, 1, out=[0, 1]), _atom(1, 2, out=[2])], "its 2 units are not alike"),
        ({"out": 2}, [_atom(0, 1, out=[0]), _atom(1, 3, out=[1])], "its 2 units are not alike"),
    ],
)
def test_what_cannot_be_divided(rows: dict[str, int], atoms: list[Atom], message: str) -> None:
    with pytest.raises(Mixed, match=message):
        find_units(rows, {"in": atoms}, {})
