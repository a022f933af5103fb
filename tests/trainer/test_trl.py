"""TRL's trainers on fold3d, also with LoRA and a reference model: the losses and weights are those of one process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.helpers import models
from tests.helpers.ranks import RankError, RankPool
from tests.trainer.jobs import Outcome
from tests.trainer.trl_jobs import TrlJob, run

pytest.importorskip("trl", reason="TRL is not installed; `pip install fold3d[trl]` brings what these tests need")

MEANS = re.compile(r"entropy|accura|logits/|num_tokens")
"""Logs that are means of micro-batches' means: a replica's micro-batches are averaged with the others' first."""


def assert_same(ours: Outcome, theirs: Outcome, replicas: int) -> None:
    """Logs to the single precision in which TRL and the stock loop sum them, weights to double precision."""
    for mine, wanted in zip([*ours.logs, ours.metrics], [*theirs.logs, theirs.metrics], strict=True):
        assert mine.keys() == wanted.keys()
        for key, value in wanted.items():
            if replicas == 1 or not MEANS.search(key):
                assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert len(ours.logs) >= 3 and ours.logs[0]["grad_norm"] > 0
    assert ours.weights.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=0, atol=1e-10, msg=name)


def compare(job: TrlJob, ranks: RankPool, layout: dict[str, Any]) -> list[Outcome]:
    replicas = layout.get("dp", 1)
    Path(job.folder).mkdir(exist_ok=True)
    stock = run(replace(job, folder=job.folder + "/stock"), None, replicas)
    found: list[Outcome] = ranks.run(run, replicas * layout.get("pp", 1) * layout.get("tp", 1), job, layout)
    for ours in found:
        assert_same(ours, stock, replicas)
    return found


@pytest.mark.parametrize(
    "layout, arguments",
    [
        ({"dp": 2, "pp": 2}, {}),
        ({"pp": 2, "segments": 2}, {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_sft(layout: dict[str, Any], arguments: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    compare(TrlJob(str(tmp_path), "SFT", {"gradient_checkpointing": False} | arguments), ranks, layout)


@pytest.mark.parametrize("strategy", ["bfd", "wrapped", "bfd_split"])
@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2}, {"pp": 2, "segments": 2}, {"tp": 2}], ids=str)
def test_sft_packs(strategy: str, layout: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"packing": True, "packing_strategy": strategy, "gradient_checkpointing": False, "max_length": 12}
    compare(TrlJob(str(tmp_path), "SFT", arguments | {"max_steps": 2}, samples=64), ranks, layout)


@pytest.mark.parametrize("lora", [False, True])
def test_sft_with_shards(lora: bool, ranks: RankPool, tmp_path: Path) -> None:
    compare(TrlJob(str(tmp_path), "SFT", {"gradient_checkpointing": False}, lora=lora), ranks, {"tp": 2})


FOLDED = {"dp": 2, "pp": 2, "segments": 2, "bucket_bytes": 1, "dp_sync": "zero1"}


def test_sft_with_lora(ranks: RankPool, tmp_path: Path) -> None:
    """Frozen weights have no gradients, no optimizer state and no part in DP.sync; the adapter is in PEFT's files."""
    job = TrlJob(str(tmp_path), "SFT", {"gradient_checkpointing": False}, lora=True)
    found = compare(job, ranks, FOLDED)
    adapter = {name: value for name, value in found[0].weights.items() if "lora_" in name}
    trained = sum(value.numel() for value in adapter.values())
    assert 0 < trained < sum(value.numel() for value in found[0].weights.values()) / 20
    for one in found:
        assert one.extra["gradients"] == one.extra["state"] == 0
    for replica in (found[:2], found[2:]):  # gradients one way and weights the other; small buckets are padded
        assert 2 * 8 * trained <= sum(one.extra["dp_bytes"] for one in replica) < 2 * 2 * 8 * trained
    base = models.build(models.MODELS["llama"](layers=4), dtype=torch.float64)
    loaded = PeftModel.from_pretrained(base, tmp_path).state_dict()
    for name, value in adapter.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    "layout, job",
    [
        ({"dp": 2, "pp": 2}, {"reference": True}),
        ({"dp": 2}, {"lora": True}),  # the model runs twice: with its adapter and without
        ({"pp": 2}, {"lora": True, "reference": True}),
        ({"pp": 2}, {"lora": True, "arguments": {"precompute_ref_log_probs": True}}),
    ],
    ids=str,
)
def test_dpo(layout: dict[str, Any], job: dict[str, Any], ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"gradient_checkpointing": False, **job.pop("arguments", {})}
    compare(TrlJob(str(tmp_path), "DPO", arguments, **job), ranks, layout)


def test_dpo_whose_model_is_its_own_reference_is_not_cut(ranks: RankPool, tmp_path: Path) -> None:
    job = TrlJob(str(tmp_path), "DPO", {"gradient_checkpointing": False}, lora=True)
    with pytest.raises(RankError) as refused:
        ranks.run(run, 2, job, {"pp": 2})
    for text in refused.value.failures.values():
        assert re.search("calls the model a second time .* set pp=1 and segments=1", text, re.DOTALL), text
