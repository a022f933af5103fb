"""Settings that cannot work are refused before anything starts."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch

from fold3d import ParallelConfig
from fold3d.config import text_of_bytes
from fold3d.errors import ConfigError
from fold3d.topology import Topology


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 0}, "pp=0"),
        ({"segments": -1}, "segments=-1"),
        ({"micro_batches": 2.5}, "micro_batches=2.5"),
        ({"dp": True}, "dp=True"),
        ({"tp": 0}, "tp=0: must be an integer of at least 1"),
        ({"tp_plan": {"head": "whole"}}, "tp_plan={'head': 'whole'} has no effect with tp=1; remove it, or raise tp"),
        ({"tp": 2, "tp_plan": ["head"]}, "tp_plan=['head']: must be a dict from module names or patterns"),
        ({"tp": 2, "tp_plan": {"head": 1}}, "tp_plan={'head': 1}: must be a dict from module names or patterns"),
        ({"comm_timeout": 0}, "comm_timeout=0"),
        ({"comm_timeout": "5m"}, "comm_timeout='5m': must be a positive number of seconds"),
        ({"comm_timeout": float("inf")}, "comm_timeout=inf: must be a positive number of seconds, 1e+09 at most"),
        ({"comm_timeout": True}, "comm_timeout=True"),
        ({"patience": float("nan")}, "patience=nan"),
        ({"blocks": ""}, "blocks='': must be the name of the ModuleList"),
        ({"blocks": 3}, "blocks=3: must be the name of the ModuleList"),
        ({"blocks": None}, "blocks=None: must be the name of the ModuleList"),
        ({"seed": "7"}, "seed='7': must be an integer from 0 to 9223372036854775807"),
        ({"seed": -1}, "seed=-1: must be"),
        ({"seed": 1.0}, "seed=1.0: must be"),
        ({"seed": True}, "seed=True: must be"),
        ({"seed": torch.tensor(3.5)}, r"seed=tensor(3.5000): must be"),
        ({"seed": numpy.array([1, 2])}, "seed=array([1, 2]): must be"),
        ({"seed": 1 << 63}, "seed=9223372036854775808: must be"),
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
        ({"memory_limit": 24}, """memory_limit=24: no process fits into 24 bytes; did you mean "24GB"?"""),
        ({"memory_limit": 0}, "memory_limit=0: must be a positive number of bytes"),
        ({"memory_limit": "8 bananas"}, "memory_limit='8 bananas': must be a positive number of bytes, such as"),
        (
            {"memory_limit": "8G"},
            """memory_limit='8G': must be a positive number of bytes, such as 8000000000, 8e9, "8GB\"""",
        ),
        ({"memory_limit": "-1GB"}, "memory_limit='-1GB': must be"),
        ({"memory_limit": "0.3B"}, "memory_limit='0.3B': must be"),
        ({"memory_limit": float("inf")}, "memory_limit=inf: must be"),
        ({"memory_limit": float("nan")}, "memory_limit=nan: must be"),
        ({"memory_limit": ""}, "memory_limit='': must be"),
        ({"preempt": "no"}, "preempt='no': must be True or False"),
    ],
)
def test_bad_values_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ParallelConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [7, numpy.int64(7), torch.tensor(7)], ids=lambda seed: type(seed).__name__)
def test_a_seed_is_any_whole_number(seed: Any) -> None:
    assert repr(ParallelConfig(seed=seed)) == repr(ParallelConfig(seed=7)), "ranks compare what is written"


def test_dp_fills_the_world() -> None:
    assert ParallelConfig(pp=2).resolve_dp(8) == 4
    assert ParallelConfig(tp=2, pp=2).resolve_dp(8) == 2
    assert ParallelConfig(tp=2).resolve_dp(2) == 1


@pytest.mark.parametrize(("config", "world"), [({"dp": 2, "pp": 2}, 3), ({"pp": 3}, 4), ({"pp": 4}, 2)])
def test_a_grid_that_is_not_the_world(config: dict[str, int], world: int) -> None:
    with pytest.raises(ConfigError, match=f"the job has {world} process"):
        ParallelConfig(**config).resolve_dp(world)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"dp_sync": "zero1"}, {"bucket_bytes": 4096}, {"preempt": False}])
def test_settings_of_replicas_need_several(settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name}=.* has no effect with one replica; remove it"):
        ParallelConfig(pp=2, **settings).resolve_dp(2)  # type: ignore[arg-type]
    assert ParallelConfig(pp=2, **settings).resolve_dp(4) == 2  # type: ignore[arg-type]


def test_one_process_is_told_how_to_start_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--pp", "2", "--name", "my model"])
    line = "torchrun --standalone --nproc-per-node {} train.py --pp 2 --name 'my model'"
    with pytest.raises(ConfigError, match=re.escape(f"but the job has 1 process(es); start it with {line.format(2)}")):
        ParallelConfig(pp=2).resolve_dp(1)
    with pytest.raises(ConfigError, match=re.escape("dp*tp*pp = 3*1*2 = 6, but the job has 1 process(es); start it")):
        ParallelConfig(dp=3, pp=2).resolve_dp(1)
    with pytest.raises(ConfigError, match=r"pp=2 needs 2 processes, or a multiple of them, .* start 4 processes"):
        ParallelConfig(pp=2).resolve_dp(3)
    with pytest.raises(ConfigError, match=r"tp\*pp = 2\*2 = 4 needs 4 processes, .* start 8 .* change dp, tp or pp"):
        ParallelConfig(tp=2, pp=2).resolve_dp(6)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 gib", 3 << 29),
        ("8e9", 8 * 10**9),
        (8e9, 8 * 10**9),
        ("64kB", 64000),
        ("2TB", 2 * 10**12),
        (" 4096 ", 4096),
        ("4096B", 4096),
        (4096, 4096),
    ],
)
def test_sizes_in_words(text: object, size: int) -> None:
    config = ParallelConfig(memory_limit=text, bucket_bytes=text)  # type: ignore[arg-type]
    assert (config.memory_limit, config.bucket_bytes) == (size, size) and config.memory_size == size
    assert type(config.memory_limit) is int


def test_topology_covers_the_grid_once() -> None:
    cells = [Topology(dp=3, pp=2, rank=rank) for rank in range(6)]
    assert [(cell.dp_rank, cell.pp_rank) for cell in cells] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert cells[3].pipeline(1) == [2, 3]
    assert cells[3].replicas(1) == [1, 3, 5]
    assert list(cells[3].chunks(3)) == [1, 3, 5]


@pytest.mark.parametrize(
    "size, text",
    [(1, "1 B"), (999, "999 B"), (1500, "1.5 kB"), (7_981_000_001, "7.99 GB"), (12_345_678_900_001, "12345.68 GB")],
)
def test_what_a_message_says_is_enough(size: int, text: str) -> None:
    assert text_of_bytes(size) == text
    if size >= 1000:  # no process fits into less
        assert (ParallelConfig(memory_limit=text).memory_size or 0) >= size
