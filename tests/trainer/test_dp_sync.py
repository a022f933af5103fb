"""The Trainer with every way of DP.sync: the same bits, and whole weights for whoever reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Outcome
from tests.trainer.sync_jobs import Counts, Sees, UsesAtOnce, Watched, run

WAYS = ("serial", "early", "zero1")
LAYOUT = {"dp": 2, "pp": 2, "segments": 2, "bucket_bytes": 1}
ARGUMENTS = {
    "max_steps": 7,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_grad_norm": 0.5,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 4,
}
TIMES = ("step_ms", "dp_hidden_ms", "dp_exposed_ms", "bubble_ms", "pp_exposed_ms", "dp_held_ms", "preemptions")
PREDICTED = {f"predicted_{part}" for part in ("step", "bubble", "pp_exposed", "dp_exposed", "dp_hidden")}

Ranks = list[Outcome]


@pytest.fixture(scope="module")
def unread(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    """Way -> what every rank has of a training in which nothing waits for weights but saving and evaluating."""
    return by_way(ranks, tmp_path_factory.mktemp("unread"), Counts)


@pytest.fixture(scope="module")
def read(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    """The same with a callback that reads weights in each step."""
    return by_way(ranks, tmp_path_factory.mktemp("read"), Sees)


def by_way(ranks: RankPool, folder: Path, callback: type[Sees]) -> dict[str, Ranks]:
    job = Job(str(folder), dtype="float32", samples=32, arguments=ARGUMENTS, variant=Watched(callback))
    found = ranks.run(run, 4, job, LAYOUT, WAYS, timeout=150)
    return {way: [rank[k] for rank in found] for k, way in enumerate(WAYS)}


@pytest.mark.parametrize("way", ["early", "zero1"])
def test_the_same_bits(unread: dict[str, Ranks], way: str) -> None:
    """Losses, norms, evaluations, weights and the optimizer's state, with decay groups, a schedule and clipping."""
    serial = unread["serial"]
    clipped = [norm for norm in serial[0].column("grad_norm") if norm > ARGUMENTS["max_grad_norm"]]  # type: ignore[operator]
    assert len(serial[0].column("loss")) == 7 and len(serial[0].column("eval_loss")) == 3 and clipped
    for mine, theirs in zip(unread[way], serial, strict=True):
        assert mine.logs == theirs.logs and mine.metrics == theirs.metrics
        assert mine.weights.keys() == theirs.weights.keys()
        assert all(torch.equal(mine.weights[name], value) for name, value in theirs.weights.items())
        assert mine.extra["saved"] == theirs.extra["saved"] and len(mine.extra["saved"]) == 2
        assert mine.extra["final"] == theirs.extra["final"]


@pytest.mark.parametrize("way", WAYS)
def test_replicas_hold_the_same_bits_in_every_checkpoint(unread: dict[str, Ranks], way: str) -> None:
    for stage in (0, 1):
        mine, other = (unread[way][rank].extra for rank in (stage, 2 + stage))
        assert mine["saved"] == other["saved"] and mine["final"] == other["final"]
    assert unread[way][0].extra["final"] != unread[way][1].extra["final"]


@pytest.mark.parametrize("way", ["early", "zero1"])
def test_a_callback_that_reads_weights_sees_them_whole(read: dict[str, Ranks], way: str) -> None:
    for rank, theirs in enumerate(read["serial"]):
        seen = read[way][rank].extra["seen"]
        assert seen == theirs.extra["seen"]
        assert {event for event, _, _ in seen} == {"step_end", "log", "save", "evaluate"}
        assert len({code for event, _, code in seen if event == "step_end"}) == 7
    assert read[way][0].logs == read["serial"][0].logs, "reading changes nothing"


@pytest.mark.parametrize("way", ["early", "zero1"])
def test_a_callback_that_reads_none_is_not_waited_for(
    unread: dict[str, Ranks], read: dict[str, Ranks], way: str
) -> None:
    assert all(outcome.extra["warned"] == [] for outcome in unread[way] + read[way])
    for outcome, serial in zip(unread[way], unread["serial"], strict=True):
        waiting = [count for event, _, count in outcome.extra["seen"] if event == "step_end"]
        assert len(waiting) == 7 and all(waiting), waiting
        assert not any(count for _, _, count in serial.extra["seen"])


def test_logs_carry_the_breakdown(unread: dict[str, Ranks]) -> None:
    for way in WAYS:
        for outcome in unread[way]:
            logs = [entry for entry in outcome.extra["logs"] if "loss" in entry]
            assert len(logs) == 7 and all(entry[name] >= 0 for entry in logs for name in TIMES)
            assert all(entry["step_ms"] > 0 for entry in logs)
            for entry in logs:  # a prediction that steps are off from is left out: tests/engine/test_replanner.py
                predicted = {name.removesuffix("_ms") for name in entry if name.startswith("predicted")}
                assert predicted in (set(), PREDICTED)
            assert not any("dp_hidden_ms" in entry for entry in outcome.extra["logs"] if "loss" not in entry)
            if way == "serial":
                assert all(entry["dp_hidden_ms"] == 0 for entry in logs)


def test_saving_evaluating_and_predicting_right_after_a_step(ranks: RankPool, tmp_path: Path) -> None:
    arguments: dict[str, Any] = ARGUMENTS | {"max_steps": 4, "eval_strategy": "no", "save_strategy": "no"}
    job = Job(str(tmp_path), dtype="float32", samples=16, arguments=arguments, variant=UsesAtOnce())
    for serial, *others in ranks.run(run, 4, job, LAYOUT, WAYS, timeout=150):
        assert len(serial.extra) == 3
        for other in others:
            assert other.extra == serial.extra and other.logs == serial.logs
            assert all(torch.equal(other.weights[name], value) for name, value in serial.weights.items())
