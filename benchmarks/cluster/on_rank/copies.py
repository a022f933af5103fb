"""copies_at(): copies between the device and the pool as slow as over a given link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fold3d import _C
from fold3d.stage.offload import offload_options


@contextmanager
def copies_at(rate: float) -> Iterator[None]:
    """In its body, engines are built whose copies take as long as at `rate` bytes per second, both directions together,
    and planned for that as if the pool were no memory of the device's; 0: nothing is changed. fold3d has no such
    setting: a link is as fast as it is."""
    if not rate:
        yield
        return

    def limited(*given: Any) -> _C.OffloadOptions | None:
        options = offload_options(*given)
        return None if options is None else _C.OffloadOptions(bytes_per_second=rate)

    link = {"copy_bandwidth": rate, "pool_is_elsewhere": True}
    with (
        mock.patch("fold3d.engine.builder.offload_options", limited),
        mock.patch("fold3d.engine.planning.planner._copies", return_value=link),
    ):
        yield
