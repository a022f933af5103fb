"""Processes that a launcher starts again find nothing of those before them in the store that it keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from fold3d.comms.fresh_store import fresh_store


def start(store: dist.Store, world: int) -> list[dist.Store]:
    """Returns the stores of `world` ranks that are started at once."""
    with ThreadPoolExecutor(world) as pool:
        found = [pool.submit(fresh_store, store.clone(), rank, world) for rank in range(world)]
        return [one.result(30) for one in found]


def test_each_start_has_a_store_of_its_own() -> None:
    shared = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    seen: list[str] = []
    for number, world in enumerate((4, 2, 4, 1)):
        stores = start(shared, world)
        assert not any(store.check(["failure"]) for store in stores), "of ranks that have ended"
        stores[0].set("failure", str(number))
        seen += {store.get("failure").decode() for store in stores}
    assert seen == ["0", "1", "2", "3"]


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="rank 1 has not come"):
        fresh_store(store, 0, 2)
