"""Checkpoints under tensor parallelism: the stock files, which any dp, tp and pp resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.dist.parity_jobs import causal_loss
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Outcome, Variant, run_fold3d, run_stock
from tests.trainer.test_checkpoints import SAVING, STEP, assert_continues, continued, with_eval

ARGUMENTS = SAVING | {"adam_epsilon": 1e-4}
"""With the usual one rounding errors of gradients that are zero count."""
SHARDED = {"dp": 2, "tp": 2, "dp_sync": "zero1", "bucket_bytes": 1, "tp_overlap": "none", "sequence_parallel": True}
"""Each rank has half of the optimizer's state of its part, and half of the sequence between blocks."""
SPARING = {"schedule": "aiao", "recompute": "full", "offload": "boundaries", "offload_optimizer": True}
"""What saves memory, which the run that saved did not do."""


class Precise(Variant):
    """A GPT-2 with four heads whose loss is not cast to single precision, on the meta device if so said."""

    def __init__(self, *, tied: bool = False, on_meta: bool = False) -> None:
        self.tied, self.on_meta = tied, on_meta

    def model(self) -> Any:
        """Returns it."""
        config = models.gpt2_config(heads=4, tied=self.tied)
        made: Any = models.build(config, dtype=torch.float64, device="meta" if self.on_meta else "cpu")
        made.loss_function = causal_loss
        return made

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"model": self.model()}


@pytest.fixture(scope="module")
def sharded(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Outcome]:
    """A run on four processes that saved after steps 3 and 6."""
    folder = str(tmp_path_factory.mktemp("sharded"))
    job = Job(folder, samples=40, arguments=ARGUMENTS, variant=Precise())
    return job, ranks.run(run_fold3d, 4, job, SHARDED, timeout=150)[0]


def test_files_are_those_of_one_process(sharded: tuple[Job, Outcome], tmp_path: Path) -> None:
    job, outcome = sharded
    alone = run_stock(replace(job, folder=str(tmp_path)), replicas=2)
    for name, value in alone.weights.items():
        torch.testing.assert_close(outcome.weights[name], value, rtol=0, atol=1e-10)
    files = [Path(folder) / STEP / "model.safetensors" for folder in (job.folder, tmp_path)]
    ours, stock = (load_file(file) for file in files)
    assert ours.keys() == stock.keys()
    for name, value in stock.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)
    found, wanted = (
        torch.load(Path(folder) / STEP / "optimizer.pt", weights_only=True) for folder in (job.folder, tmp_path)
    )
    assert found["param_groups"] == wanted["param_groups"] and found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert state.keys() == found["state"][index].keys()
        for key, value in state.items():
            assert found["state"][index][key].dtype == value.dtype
            torch.testing.assert_close(found["state"][index][key], value, rtol=0, atol=1e-10)
    loaded = AutoModelForCausalLM.from_pretrained(Path(job.folder) / "checkpoint-6").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in outcome.weights.items())


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    ("processes", "layout", "micro_batches"),
    [
        (1, {}, 8),
        (2, {"pp": 2}, 8),
        (4, {"tp": 4, "sequence_parallel": True}, 8),
        (4, {"tp": 2, "pp": 2, "segments": 2, "sequence_parallel": True, **SPARING}, 8),
        (2, {"tp": 2, "sequence_parallel": False}, 8),
        (2, {"dp": 2, "dp_sync": "zero1"}, 4),
    ],
    ids=["alone", "pp", "tp", "tp and pp", "whole sequences", "dp"],
)
def test_any_layout_resumes(
    ranks: RankPool,
    sharded: tuple[Job, Outcome],
    tmp_path: Path,
    processes: int,
    layout: dict[str, Any],
    micro_batches: int,
) -> None:
    job, whole = sharded
    other = continued(job, tmp_path, gradient_accumulation_steps=micro_batches)
    resumed = ranks.run(run_fold3d, processes, other, layout, timeout=150)[0]
    assert_continues(resumed, replace(whole, metrics=resumed.metrics), 1e-10)


@pytest.mark.parametrize("dp_sync", ["zero1", "early"])
def test_the_same_layout_goes_on_with_the_same_bits(
    ranks: RankPool, sharded: tuple[Job, Outcome], tmp_path: Path, dp_sync: str
) -> None:
    job, whole = sharded
    resumed = ranks.run(run_fold3d, 4, continued(job, tmp_path), SHARDED | {"dp_sync": dp_sync}, timeout=150)[0]
    assert_continues(resumed, whole, 0.0)


def test_the_stock_trainer_resumes_it(sharded: tuple[Job, Outcome], tmp_path: Path) -> None:
    job, whole = sharded
    assert_continues(run_stock(continued(job, tmp_path), replicas=2), with_eval(job, whole, tmp_path), 1e-10)


def test_what_others_wrote_is_resumed(ranks: RankPool, tmp_path: Path) -> None:
    """Tied vocabulary; the stock Trainer's checkpoint, and one of two stages with two segments."""
    for name, processes, layout in (("stock", 0, {}), ("stages", 2, {"pp": 2, "segments": 2})):
        job = Job(str(tmp_path / name), samples=40, arguments=ARGUMENTS, variant=Precise(tied=True))
        whole = ranks.run(run_fold3d, processes, job, layout)[0] if processes else run_stock(job)
        other = {"tp": 2, "pp": 2, "sequence_parallel": True}
        resumed = ranks.run(run_fold3d, 4, continued(job, tmp_path / f"{name} resumed"), other)[0]
        assert_continues(resumed, replace(whole, metrics=resumed.metrics), 1e-10)


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_model_on_meta_is_the_same_for_every_layout(ranks: RankPool, tmp_path: Path, pretrained: bool) -> None:
    arguments = {"adam_epsilon": 1e-4}
    job = Job(str(tmp_path / "run"), samples=24, arguments=arguments, variant=Precise(on_meta=True))
    weights = {"weights": "random"}
    if pretrained:
        Precise().model().save_pretrained(tmp_path / "model")
        weights = {"weights": str(tmp_path / "model")}
    layouts: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}]
    alone, *others = (
        ranks.run(run_fold3d, layout.get("tp", 1) * layout.get("pp", 1), job, layout | weights, timeout=150)[0]
        for layout in layouts
    )
    assert others
    for other in others:
        assert_continues(other, alone, 1e-10)
