"""The Reducer: which gradients count, which are refused, in which order complete buckets are handed over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.reducer import Reducer
from fold3d.errors import ConfigError
from fold3d.placement.bucket_layout import BucketSpec
from fold3d.topology import Submesh
from fold3d.trace.coat import Coat


class Setup:
    """Two buckets of two parameters each in one chunk; `x` does not know them, `stale` are not up to date."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.parameters = {name: nn.Parameter(torch.full((3,), 2.0, dtype=dtype)) for name in "abcd"}
        self.buckets = [
            Bucket(
                number,
                BucketSpec(chunk=0, names=tuple(names), modules=(), chunks=(), summed_over=Submesh(pp=(0,)), planned=0),
                self.parameters,
                1,
                0,
            )
            for number, names in enumerate(("ab", "cd"))
        ]
        self.pushed: list[int] = []
        self.stale: set[int] = set()
        self.coat = Coat()
        self.reducer = Reducer(
            self.coat,
            self.buckets,
            dict.fromkeys("abcd", 1),
            lambda bucket: self.pushed.append(bucket.number),
            lambda bucket: bucket.number in self.stale,
        )

    def begin(self, micro_batches: int, *, attach: bool = True) -> None:
        """Begins a step."""
        for bucket in self.buckets:
            bucket.clear()
            if attach:
                bucket.attach()
        self.reducer.begin(micro_batches, [0], hold=False)

    def backward(self, names: str) -> None:
        """Gives each of `names` a gradient of three."""
        sum(3 * self.parameters[name].float().sum() for name in names).backward()  # type: ignore[union-attr]

    def gradients(self) -> dict[str, float]:
        """Returns each parameter's sum so far."""
        views = ((n, v) for bucket in self.buckets for n, v in zip(bucket.names, bucket.views, strict=True))
        return {name: float(view[0]) for name, view in views}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["own-dtype", "wider-sums"])
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    found = Setup(request.param)
    yield found
    found.coat.close()


def test_buckets_are_handed_over_when_all_gradients_came_the_last_first(setup: Setup) -> None:
    setup.begin(2)
    setup.backward("abcd")
    assert setup.pushed == []
    setup.backward("ab")
    assert setup.pushed == [], "bucket 0 is complete, but behind bucket 1"
    setup.backward("d")
    setup.backward("c")
    assert setup.pushed == [1, 0]
    assert setup.gradients() == dict.fromkeys("abcd", 6.0)
    assert [bucket.used for bucket in setup.buckets] == [[True, True]] * 2


def test_what_no_micro_batch_used_is_complete_with_the_chunk(setup: Setup) -> None:
    setup.begin(1)
    setup.backward("acd")
    assert setup.pushed == [1]
    setup.reducer.chunk_done(0)
    assert setup.pushed == [1, 0]
    assert [list(bucket.used) for bucket in setup.buckets] == [[True, False], [True, True]]


def test_a_gradient_too_many_is_refused(setup: Setup) -> None:
    setup.begin(1)
    setup.backward("cd")
    with pytest.raises(ConfigError, match="c got another gradient after its sum over the replicas had begun"):
        setup.backward("c")


def test_a_gradient_of_weights_that_were_not_up_to_date_is_refused(setup: Setup) -> None:
    setup.begin(1, attach=False)
    setup.stale = {0}
    setup.backward("cd")
    with pytest.raises(ConfigError, match="a was read before it was up to date"):
        setup.backward("a")
