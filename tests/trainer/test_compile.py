"""torch_compile: blocks are compiled, and train as they do when they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fold3d.engine.arguments import check_compiled
from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock

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


@pytest.mark.full
@pytest.mark.parametrize("layout", [{}, {"segments": 2}])
def test_parity(tmp_path: Path, layout: dict[str, Any]) -> None:
    whole = Job(str(tmp_path), samples=32, variant=Counting(), arguments=AOT)
    stock = run_stock(replace(whole, arguments={}))
    ours = run_fold3d(whole, layout)
    compiled, breaks, names = ours.extra
    assert compiled > 0 and not breaks and names == stock.extra[2]
    assert_same(ours, stock, 1e-10)


LAYOUTS = {
    "stages": {"pp": 2, "segments": 2},
    "replicas": {"dp": 2, "dp_sync": "zero1"},
    "recomputed": {"pp": 2, "segments": 1, "recompute": "blocks"},
    "offloaded": {"pp": 2, "segments": 1, "offload": "activations"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parity_on_two_processes(ranks: RankPool, tmp_path: Path, name: str) -> None:
    whole = Job(str(tmp_path), samples=32, variant=Counting(), arguments=AOT)
    plain = ranks.run(run_fold3d, 2, replace(whole, arguments={}), LAYOUTS[name])
    for ours, other in zip(ranks.run(run_fold3d, 2, whole, LAYOUTS[name]), plain, strict=True):
        compiled, breaks, names = ours.extra
        assert compiled > 0 and not breaks and names == other.extra[2]
        assert_same(ours, other, 1e-10)


@pytest.mark.dist
def test_parity_with_code_that_is_generated(ranks: RankPool, tmp_path: Path) -> None:
    """By inductor, the default backend, which needs a C++ compiler here."""
    whole = Job(str(tmp_path), samples=32, variant=Counting(), arguments={"torch_compile": True})
    stock = ranks.run(run_stock, 1, replace(whole, arguments={}))[0]
    for ours in ranks.run(run_fold3d, 2, whole, {"pp": 2, "segments": 2}, timeout=900):
        compiled, breaks, _ = ours.extra
        assert compiled > 0 and not breaks
        assert_same(ours, stock, 1e-10)


def test_refused_where_blocks_are_shared_out() -> None:
    with pytest.raises(ConfigError, match=r"with tp=2 are not available.* set tp=1"):
        check_compiled(2, {})
    check_compiled(1, {})
    check_compiled(2, None)
