"""torch_compile: blocks are compiled, and train as they do when they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fold3d
from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, model_of, run_fold3d, run_stock

AOT = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


class Counting(Variant):
    """Says how many functions were compiled since the Trainer was made, and what interrupted them."""

    def trainer(self, base: type[Any]) -> type[Any]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        return base

    def after(self, trainer: Any) -> Any:
        counters = torch._dynamo.utils.counters
        return counters["frames"]["ok"], dict(counters["graph_break"]), list(trainer.model.state_dict())


@pytest.mark.rotating
@pytest.mark.parametrize("layout", [{}, {"segments": 2}])
def test_parity(tmp_path: Path, layout: dict[str, Any]) -> None:
    whole = Job(str(tmp_path), samples=32, variant=Counting(), arguments=AOT)
    stock = run_stock(replace(whole, arguments={}))
    ours = run_fold3d(whole, layout)
    compiled, breaks, names = ours.extra
    assert compiled > 0 and not breaks and names == stock.extra[2]
    assert_same(ours, stock, 1e-10)


def test_refused_with_several_processes(ranks: RankPool, tmp_path: Path) -> None:
    assert all("with 2 processes are not available" in told for told in ranks.run(refused, 2, Job(str(tmp_path))))


def refused(job: Job) -> str:
    """Returns the error of compiling where there are several processes."""
    with pytest.raises(ConfigError) as caught:
        fold3d.Engine(model_of(job), fold3d.ParallelConfig(pp=2, segments=1), compile_options={})
    return str(caught.value)
