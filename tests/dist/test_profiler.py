"""torch.profiler shows what a step does: ranges of stage, chunk and micro-batch, and of the waits for each exchange."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fold3d
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, stock_arguments, trainer_arguments

COMPUTE = re.compile(r"(F|B) stage (\d) chunk (\d) micro-batch (\d)")


def profiled(folder: str, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the ranges of this process in a trace of torch.profiler, of two steps."""
    job = Job(folder, arguments={"max_steps": 2})
    args = fold3d.TrainingArguments(**stock_arguments(job), **layout)
    trainer = fold3d.Trainer(args=args, **trainer_arguments(job))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.train()
    trainer.engine.close()
    path = Path(folder) / f"trace-{args.process_index}.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") == "user_annotation"]


def names_of(events: list[dict[str, Any]]) -> set[str]:
    return {event["name"] for event in events}


@pytest.mark.gate
def test_stages_and_replicas(ranks: RankPool, tmp_path: Path) -> None:
    layout = {"dp": 2, "pp": 2, "segments": 2, "schedule": "aiao"}
    for rank, events in enumerate(ranks.run(profiled, 4, str(tmp_path), layout)):
        stage, names = rank % 2, names_of(events)
        computed = {match.groups() for name in names if (match := COMPUTE.fullmatch(name))}
        chunks = (stage, stage + 2)
        assert computed == {(kind, str(stage), str(c), str(m)) for kind in "FB" for c in chunks for m in range(2)}
        assert sum(COMPUTE.fullmatch(event["name"]) is not None for event in events) == 2 * len(computed)
        for chunk in chunks:
            assert f"DP.sync REDUCE_GRAD stage {stage} chunk {chunk}" in names
        assert any(name.startswith("DP.sync wait ") for name in names)
        sent = f"PP.sync SEND_F stage {stage} chunk {stage} micro-batch 0"
        waited = f"PP.sync wait RECV_F stage {stage} chunk {1 if stage else 2} micro-batch 0"
        assert sent in names and waited in names, sorted(names)


def test_shards(ranks: RankPool, tmp_path: Path) -> None:
    for events in ranks.run(profiled, 2, str(tmp_path), {"tp": 2, "segments": 1}):
        waits = [event for event in events if event["name"] == "TP.sync wait"]
        inside = [event for event in events if COMPUTE.fullmatch(event["name"])]
        assert waits and inside
        within = [
            wait
            for wait in waits
            if any(one["ts"] <= wait["ts"] and wait["ts"] + wait["dur"] <= one["ts"] + one["dur"] + 1 for one in inside)
        ]
        assert len(within) > len(waits) / 2, "sums of blocks lie in forwards and backwards"
