"""Tree: everybody hangs on it once, nobody has many neighbours, few levels."""

from __future__ import annotations

import pytest

from fold3d.comms.tree_group import FAN_OUT, Tree
from fold3d.topology import Topology
from tests.helpers.trees import connections, levels, messages

SIZES = [1, 2, 3, 4, 5, 6, 7, 21, 22, 64, 100, 512, 4096]


@pytest.mark.parametrize("fan_out", [1, 2, FAN_OUT])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_tree_of_ranges(size: int, fan_out: int) -> None:
    tree = Tree(size, fan_out)
    assert tree.parent(0) is None and tree.subtree(0) == range(size)
    for member in range(size if fan_out > 1 else min(size, 64)):
        children, below = tree.children(member), tree.subtree(member)
        assert len(children) <= fan_out and all(tree.parent(child) == member for child in children)
        parts = [member, *(one for child in children for one in tree.subtree(child))]
        assert parts == list(below), "a subtree is its top and then those of its children, in order"
    assert sum(len(tree.children(member)) for member in range(min(size, 512))) <= size - 1


@pytest.mark.parametrize("size", SIZES)
def test_levels_are_as_many_as_the_longest_way_up(size: int) -> None:
    tree = Tree(size)

    def depth(member: int) -> int:
        parent = tree.parent(member)
        return 0 if parent is None else 1 + depth(parent)

    assert levels(tree) == max(depth(member) for member in range(size))
    assert FAN_OUT ** levels(tree) < FAN_OUT * size


@pytest.mark.parametrize("dp, pp", [(1, 1), (2, 2), (4, 2), (1, 8), (64, 8), (512, 8), (2048, 2)])
def test_connections_are_few_however_many_ranks(dp: int, pp: int) -> None:
    most = max(connections(Topology(dp=dp, pp=pp, rank=rank)) for rank in range(dp * pp))
    assert most <= 4 * FAN_OUT
    assert messages(dp, pp) == 2 * (dp * pp - 1)


def test_a_member_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="member 4 is outside a tree of 4"):
        Tree(4).children(4)
