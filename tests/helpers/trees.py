"""How many connections, messages and rounds the trees of a job have, by formula; tests count, and compare."""

from __future__ import annotations

from fold3d.comms.tree_group import Tree
from fold3d.topology import Topology


def messages(dp: int, pp: int, tp: int = 1) -> int:
    """Returns how many messages one `all_reduce` of a job takes, up and down together: each way one per member that is
    not the first."""
    return 2 * (tp * (pp * (dp - 1) + pp - 1) + tp - 1)


def rounds(dp: int, pp: int, tp: int = 1) -> int:
    """Returns how many exchanges in a family lie one after the other in an `all_reduce`."""
    return 2 * sum(levels(Tree(size)) for size in (dp, pp, tp))


def levels(tree: Tree) -> int:
    """Returns how many families lie between member 0 and the lowest members: the last child's subtree is never smaller
    than those of the others."""
    count, member = 0, 0
    while children := tree.children(member):
        count, member = count + 1, children[-1]
    return count


def connections(topology: Topology) -> int:
    """Returns with how many others, counted once per group, this rank is connected."""
    places = zip((topology.dp, topology.pp, topology.tp), topology.coordinates(topology.rank), strict=True)
    return sum(neighbours(Tree(size), place) for size, place in places)


def neighbours(tree: Tree, member: int) -> int:
    """Returns how many others `member` is connected with: at most 2 * fan_out, however many there are."""
    above = tree.parent(member)
    return len(tree.children(member)) + (0 if above is None else len(tree.children(above)))
