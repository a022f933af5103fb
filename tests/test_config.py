"""Settings that cannot work are refused before anything starts."""

from __future__ import annotations

import re

import pytest

from fold3d import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.topology import Topology


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 0}, "pp=0"),
        ({"segments": -1}, "segments=-1"),
        ({"micro_batches": 2.5}, "micro_batches=2.5"),
        ({"dp": True}, "dp=True"),
        ({"tp": 2}, "tp=2: tensor parallelism is not available"),
        ({"comm_timeout": 0}, "comm_timeout=0"),
        ({"blocks": ""}, 'blocks=""'),
        ({"group_size": 5, "micro_batches": 4}, "group_size=5 is more than micro_batches=4"),
        ({"segments": "two"}, "segments='two': must be an integer of at least 1 or \"auto\""),
        ({"segments": None}, 'segments=None: must be an integer of at least 1 or "auto"'),
        ({"group_size": "all"}, "group_size='all': must be an integer of at least 1 or \"auto\""),
        ({"group_size": 0}, "group_size=0: must be"),
        ({"schedule": None}, 'schedule=None: must be a name, the path of a CSV file, or "auto"'),
        ({"dp_sync": "zero3"}, "dp_sync='zero3': must be one of auto, zero1, early, serial"),
        ({"dp_sync": None}, "dp_sync=None: must be one of"),
        ({"bucket_bytes": -1}, "bucket_bytes=-1: must be a number of bytes"),
        ({"bucket_bytes": 1.5}, "bucket_bytes=1.5: must be a number of bytes"),
        ({"bucket_bytes": True}, "bucket_bytes=True: must be a number of bytes"),
        ({"memory_limit": 0}, "memory_limit=0: must be a positive number of bytes"),
        ({"memory_limit": 1e9}, "memory_limit=1000000000.0: must be a positive number of bytes"),
        ({"preempt": "no"}, "preempt='no': must be True or False"),
    ],
)
def test_bad_values_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ParallelConfig(**settings)  # type: ignore[arg-type]


def test_dp_fills_the_world() -> None:
    assert ParallelConfig(pp=2).resolve_dp(8) == 4


@pytest.mark.parametrize(("config", "world"), [({"dp": 2, "pp": 2}, 3), ({"pp": 3}, 4), ({"pp": 4}, 2)])
def test_a_grid_that_is_not_the_world(config: dict[str, int], world: int) -> None:
    with pytest.raises(ConfigError, match=f"the job has {world} process"):
        ParallelConfig(**config).resolve_dp(world)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"dp_sync": "zero1"}, {"bucket_bytes": 4096}, {"preempt": False}])
def test_settings_of_replicas_need_several(settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name}=.* has no effect with one replica; leave it away"):
        ParallelConfig(pp=2, **settings).resolve_dp(2)  # type: ignore[arg-type]
    assert ParallelConfig(pp=2, **settings).resolve_dp(4) == 2  # type: ignore[arg-type]


def test_the_default_schedule_depends_on_segments() -> None:
    assert ParallelConfig(pp=2, segments=1).schedule_name == "1f1b"
    assert ParallelConfig(pp=2, segments=2).schedule_name == "aiao"


def test_topology_covers_the_grid_once() -> None:
    cells = [Topology(dp=3, pp=2, rank=rank) for rank in range(6)]
    assert [(cell.dp_rank, cell.pp_rank) for cell in cells] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert cells[3].pipeline(1) == [2, 3]
    assert cells[3].replicas(1) == [1, 3, 5]
    assert cells[3].chunks(3) == [1, 3, 5]
