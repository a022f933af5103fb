"""Topology: the mesh against its definition, for every rank of small meshes."""

from __future__ import annotations

import itertools

import pytest

from fold3d.topology import Submesh, Topology, V, chunks_of, coordinates, num_segments, of_stage, segment_of, stage_of

MESHES = [(1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 4, 2), (2, 1, 4)]


@pytest.mark.parametrize(("dp", "pp", "tp"), MESHES)
def test_ranks_count_through_the_axes_from_the_innermost(dp: int, pp: int, tp: int) -> None:
    places = itertools.product(range(dp), range(pp), range(tp))
    for rank, place in enumerate(places):
        topology = Topology(dp=dp, pp=pp, tp=tp, rank=rank)
        assert coordinates(rank, pp, tp) == place == (topology.dp_rank, topology.pp_rank, topology.tp_rank)
        assert coordinates(rank, pp, tp)._fields == ("dp", "pp", "tp")
        assert topology.rank_of(*place) == rank
        assert topology.rank_of(place[0], place[1]) == rank  # at its own place on the axis tp
        assert rank in topology.pipeline(place[0]) and rank in topology.replicas(place[1])
        assert topology.has_loss == (place[1] == pp - 1)
        assert len({*topology.pipeline(place[0])}) == pp and len({*topology.replicas(place[1])}) == dp
        assert topology.pipeline(place[0], place[2]) == topology.pipeline(place[0])
        assert topology.replica(place[0]) == sorted(r for r in range(dp * pp * tp) if r // (pp * tp) == place[0])
        assert topology.shards(*place[:2]) == [r for r in topology.replica(place[0]) if r // tp == rank // tp]
    assert topology.world == rank + 1


@pytest.mark.parametrize(("dp", "pp", "tp"), MESHES)
def test_a_submesh_is_a_box_in_each_replica(dp: int, pp: int, tp: int) -> None:
    places = Submesh(pp=tuple(range(0, pp, 2)), tp=tuple(range(tp)))
    for rank in range(dp * pp * tp):
        topology = Topology(dp=dp, pp=pp, tp=tp, rank=rank)
        inside = [r for replica in range(dp) for r in topology.ranks_of(places, replica)]
        assert inside == sorted(set(inside))
        assert topology.holds(places) == (rank in inside) == (topology.pp_rank % 2 == 0)
        assert topology.source_of(places) == min(topology.ranks_of(places, topology.dp_rank))
    assert places.is_shared == (len(places.pp) * tp > 1)
    assert not Submesh(pp=(pp - 1,)).is_shared


def test_chunks_go_round_the_stages() -> None:
    for pp, segments in itertools.product((1, 2, 3), (1, 2, 4)):
        chunks = pp * segments
        assert num_segments(chunks, pp) == segments
        assert [chunk for s in range(segments) for chunk in (s * pp + stage for stage in range(pp))] == [*range(chunks)]
        for chunk in range(chunks):
            assert segment_of(chunk, pp) * pp + stage_of(chunk, pp) == chunk
            assert chunk in chunks_of(stage_of(chunk, pp), chunks, pp)
            assert of_stage(range(chunks), stage_of(chunk, pp), pp) == chunks_of(stage_of(chunk, pp), chunks, pp)
        assert list(Topology(dp=1, pp=pp, rank=pp - 1).chunks(segments)) == [*range(pp - 1, chunks, pp)]


def test_style_v_runs_every_second_segment_back() -> None:
    assert [stage_of(chunk, 3, V) for chunk in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [[*chunks_of(stage, 9, 3, V)] for stage in range(3)] == [[0, 5, 6], [1, 4, 7], [2, 3, 8]]
    assert of_stage("abcdef", 1, 3, V) == ["b", "e"]
    for segments, loss_stage in ((1, 2), (2, 0), (3, 2)):
        topology = Topology(dp=1, pp=3, rank=loss_stage, style=V, segments=segments)
        assert topology.loss_stage == loss_stage and topology.has_loss
    assert Topology(dp=1, pp=3, rank=1, style=V, segments=2).chunks(2) == [1, 4]


def test_neighbours_go_round_the_ring() -> None:
    last = Topology(dp=1, pp=3, rank=2)
    assert (last.next_stage, last.previous_stage) == (0, 1)


def test_names() -> None:
    assert Topology(dp=2, pp=2, rank=0).describe(3) == "rank 3 (replica 1, stage 1)"
    assert Topology(dp=2, pp=2, tp=2, rank=0).describe(5) == "rank 5 (replica 1, stage 0, shard 1)"
    with pytest.raises(ValueError, match="rank 4 is outside the 2 x 2 grid"):
        Topology(dp=2, pp=2, rank=4)
    with pytest.raises(ValueError, match="rank 8 is outside the 2 x 2 x 2 grid"):
        Topology(dp=2, pp=2, tp=2, rank=8)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "pp": 2, "rank": 4}, "rank 4 is outside the 2 x 2 grid"),
        ({"dp": 1, "pp": 1, "rank": -1}, "rank -1 is outside"),
        ({"dp": -1, "pp": -1, "rank": 0}, "outside the -1 x -1 grid"),
        ({"dp": -1, "pp": 1, "tp": -1, "rank": 0}, "outside the -1 x 1 x -1 grid"),
    ],
)
def test_a_rank_outside_the_mesh(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**sizes)


@pytest.mark.parametrize(("pp", "tp"), [((), (0,)), ((0,), ()), ((1, 0), (0,)), ((0, 0), (0,)), ((-1,), (0,))])
def test_no_submesh(pp: tuple[int, ...], tp: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one place on each axis, ascending"):
        Submesh(pp=pp, tp=tp)
