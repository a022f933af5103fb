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

EAGER = {"torch_compile": True, "torch_compile_backend": "eager"}
TIMEOUT = 300.0  # s: compiling takes most of the time
DROPOUT = {"family": "gpt2", "dropout": 0.1, "dtype": "float32"}


class Counting(Variant):
    """Says how many functions were compiled since the Trainer was made, and what interrupted them."""

    def trainer(self, base: type[Any]) -> type[Any]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        return base

    def after(self, trainer: Any) -> Any:
        counters = torch._dynamo.utils.counters
        return counters["frames"]["ok"], dict(counters["graph_break"]), list(trainer.model.state_dict())


@pytest.mark.parametrize(
    "processes, layout, arguments, job",
    [
        (1, {}, EAGER | {"torch_compile_backend": "aot_eager"}, {}),
        (2, {"pp": 2, "segments": 2}, EAGER, {"family": "llama"}),
        (2, {"dp": 2, "dp_sync": "zero1", "segments": 2}, EAGER, {}),
        (2, {"pp": 2, "recompute": "full"}, EAGER | {"activation_checkpointing": True}, {}),
        (2, {"pp": 2, "segments": 2, "recompute": "blocks"}, EAGER, {"family": "llama"}),
        (2, {"pp": 2, "segments": 2, "offload": "activations"}, EAGER, {"family": "llama"}),
    ],
)
def test_parity(
    ranks: RankPool,
    tmp_path: Path,
    processes: int,
    layout: dict[str, Any],
    arguments: dict[str, Any],
    job: dict[str, Any],
) -> None:
    whole = Job(str(tmp_path), samples=32, variant=Counting(), arguments=arguments, **job)
    plain = {key: value for key, value in arguments.items() if not key.startswith("torch_compile")}
    stock = run_stock(replace(whole, arguments=plain), replicas=layout.get("dp", 1))
    for ours in ranks.run(run_fold3d, processes, whole, layout, timeout=TIMEOUT):
        compiled, breaks, names = ours.extra
        assert compiled > 0 and not breaks
        assert names == stock.extra[2]
        stock.metrics = ours.metrics if layout.get("dp") else stock.metrics
        assert_same(ours, stock, 1e-10)


def test_dropout_is_that_of_the_layers(ranks: RankPool, tmp_path: Path) -> None:
    """Masks depend on module and micro-batch, compiled or not."""
    job = Job(str(tmp_path), samples=32, variant=Counting(), **DROPOUT)
    layout = {"pp": 2, "segments": 2}
    plain = ranks.run(run_fold3d, 2, job, layout, timeout=TIMEOUT)[0]
    compiled = ranks.run(run_fold3d, 2, replace(job, arguments=EAGER), layout, timeout=TIMEOUT)[0]
    assert compiled.extra[0] > 0
    assert_same(compiled, plain, 1e-6)


@pytest.mark.slow
def test_inductor(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(str(tmp_path), samples=32, variant=Counting(), dtype="float32", arguments={"torch_compile": True})
    ours = ranks.run(run_fold3d, 2, job, {"pp": 2}, timeout=TIMEOUT)[0]
    assert ours.extra[0] > 0
    assert_same(ours, run_stock(replace(job, arguments={})), 1e-4)


def test_refused_with_shards(tmp_path: Path) -> None:
    args = fold3d.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", torch_compile=True)
    args.tp = 2
    with pytest.raises(ConfigError, match="compiled blocks with tp=2 are not available"):
        fold3d.Engine(model_of(Job("")), args.parallel, compile_options={})
