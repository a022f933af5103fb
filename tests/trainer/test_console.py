"""The console shows one line per logged step; log_history and everybody else's callbacks get everything."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState

import fold3d
from fold3d.trainer.console import group_of, step_line
from fold3d.trainer.measuring import flops_of, peak_flops
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import collate, rows

STEP = {
    "loss": 5.8,
    "grad_norm": 0.5312,
    "learning_rate": 1.2e-3,
    "tokens_per_second": 1352.3,
    "peak_memory_gb": 1.24,
    "step_ms": 1588.0,
    "compute_ms": 1334.4,
    "bubble_ms": 110.5,
    "pp_exposed_ms": 11.1,
    "pp_hidden_ms": 30.0,
    "dp_exposed_ms": 12.0,
    "dp_hidden_ms": 11.5,
    "preemptions": 4.0,
    "pp_delayed_ms": 0.1,
    "dp_held_ms": 9.0,
    "other_ms": 120.0,
    "predicted_step_ms": 1495.0,
    "epoch": 0.65,
}


def state(step: int = 65, last: int = 100) -> TrainerState:
    return TrainerState(global_step=step, max_steps=last)


OURS = set(STEP) - {"loss", "grad_norm", "learning_rate", "epoch"}


def test_the_line() -> None:
    assert step_line(STEP, state(), OURS) == (
        "step 65/100 epoch 0.65  loss 5.8 grad 0.5312 lr 0.0012  1352 tok/s 1588 ms 1.2 GB  bubble 7%"
    )


def test_the_line_is_never_longer_than_a_hundred_characters() -> None:
    large = STEP | {
        "loss": 12.345678,
        "grad_norm": 1234.5678,
        "learning_rate": 2.7545e-05,
        "tokens_per_second": 115234.0,
    }
    large |= {"step_ms": 34851.0, "peak_memory_gb": 78.4, "mfu": 0.412, "skipped_steps": 12, "epoch": 12.3456}
    for step, last in ((1, 0), (65, 100), (123456, 1000000)):
        line = step_line(large, state(step, last), OURS | {"mfu", "skipped_steps"})
        assert len(line) <= 100 and f"step {step}" in line and "epoch 12.35" in line and "loss 12.35" in line, line


def test_waits_stand_by_size_and_small_ones_nowhere() -> None:
    sharded = {"step_ms": 1000.0, "compute_ms": 700.0, "tp_exposed_ms": 100.0, "tp_hidden_ms": 79.4, "bubble_ms": 150.0}
    sharded |= {"pp_exposed_ms": 9.0, "other_ms": 41.0}
    assert step_line(sharded, state(), set(sharded)) == "step 65/100  1000 ms  bubble 15% TP 10% other 4%"


def test_what_a_user_logs_stands_before_the_waits() -> None:
    alone = {
        "loss": 1.0,
        "step_ms": 10.0,
        "compute_ms": 9.0,
        "other_ms": 1.0,
        "mfu": 0.31,
        "accuracy": 0.25,
        "run": "a",
    }
    line = step_line(alone, state(3, 0), {"step_ms", "compute_ms", "other_ms", "mfu"})
    assert line == "step 3  loss 1  10 ms MFU 31%  accuracy 0.25 run a  other 10%"


def test_groups_of_reporters() -> None:
    groups = {key: group_of(key) for key in (*OURS, "predicted_dp_hidden_ms", "offload_exposed_ms", "loss_scale")}
    assert {key for key, group in groups.items() if group == "memory"} == {"peak_memory_gb", "offload_exposed_ms"}
    assert {key for key, group in groups.items() if group == "train"} == {"loss_scale"}
    perf = {"tokens_per_second", "step_ms", "compute_ms", "bubble_ms", "other_ms", "predicted_step_ms"}
    assert {key for key, group in groups.items() if group == "perf"} == perf


def test_speeds_of_devices() -> None:
    assert flops_of("NVIDIA H100 80GB HBM3") == 989e12 and flops_of("NVIDIA H100 PCIe") == 756e12
    assert flops_of("NVIDIA A100-SXM4-80GB") == 312e12 and flops_of("NVIDIA L40S") == 362e12
    assert flops_of("NVIDIA GeForce GTX 1080") is None
    assert peak_flops(torch.device("cpu"), "bf16") is None


class Seen(TrainerCallback):
    """A user's: keeps what it gets."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


class OwnPrinter(PrinterCallback):
    """A user's: prints in its own way."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        sys.stdout.write(f"mine {sorted(logs)}\n")


def train(folder: str, layout: dict[str, Any], callbacks: tuple[Any, ...] = (), bar: bool = False) -> Any:
    """Returns stdout, what a callback saw, the log history and the classes of the callbacks."""
    args = fold3d.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        disable_tqdm=not bar,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        **({"segments": 1} | layout),
    )
    seen = Seen()
    model = models.build(models.MODELS["gpt2"](layers=4))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        trainer = fold3d.Trainer(
            model=model,
            args=args,
            train_dataset=rows(32),
            eval_dataset=rows(4),
            data_collator=collate,
            callbacks=[seen, *(kind() for kind in callbacks)],
        )
        trainer.train()
    history = trainer.state.log_history
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    assert not any("on_log" in vars(callback) for callback in trainer.callback_handler.callbacks)
    trainer.engine.close()
    return out.getvalue(), seen.logs, history, kinds


LINE = re.compile(
    r"step (\d)/4 epoch \d\.\d\d  loss \S+ grad \S+ lr \S+  \d+ tok/s \d+ ms \d+\.\d GB"
    r"(  [a-zA-Z]+ \d+%( [a-zA-Z]+ \d+%)*)?"
)


def check_breakdown(entry: dict[str, float]) -> None:
    parts = ("compute_ms", "tp_exposed_ms", "bubble_ms", "pp_exposed_ms", "dp_exposed_ms", "other_ms")
    assert sum(entry.get(name, 0.0) for name in parts) == pytest.approx(entry["step_ms"], abs=1e-6)
    assert entry["other_ms"] >= -0.3
    assert {"loss", "grad_norm", "learning_rate", "epoch", "tokens_per_second"} <= set(entry)
    assert 0.05 < entry["peak_memory_gb"] < 50


@pytest.mark.parametrize("bar", [False, True])
def test_one_process(tmp_path: Path, bar: bool) -> None:
    said, seen, history, kinds = train(str(tmp_path), {}, bar=bar)
    lines = said.strip().splitlines()
    assert [int(match[1]) for line in lines if (match := LINE.fullmatch(line.strip()))] == [2, 4], said
    assert "bubble" not in said and " DP " not in said
    assert sum("eval_loss" in line and line.strip().startswith("{") for line in lines) == 1  # as stock prints it
    assert sum("train_runtime" in line and line.strip().startswith("{") for line in lines) == 1
    assert len(lines) == 4
    steps = [entry for entry in history if "loss" in entry]
    assert [dict(entry, step=0) for entry in steps] == [dict(entry, step=0) for entry in seen if "loss" in entry]
    for entry in steps:
        check_breakdown(entry)
        assert not {"bubble_ms", "dp_exposed_ms", "tp_exposed_ms", "preemptions"} & set(entry)
    assert not any("step_ms" in entry for entry in history if "eval_loss" in entry)
    assert (ProgressCallback if bar else PrinterCallback) in kinds


@pytest.mark.gate
def test_four_ranks(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(train, 4, str(tmp_path), {"dp": 2, "pp": 2})
    said, _, history, _ = results[0]
    assert all(other[0] == "" for other in results[1:]), "only rank 0 prints"
    lines = [line for line in said.splitlines() if LINE.fullmatch(line)]
    assert len(lines) == 2 and all(len(line) <= 100 for line in lines)
    for entry in history:
        if "loss" in entry:
            check_breakdown(entry)
            assert {"bubble_ms", "pp_hidden_ms", "dp_exposed_ms", "dp_hidden_ms", "preemptions"} <= set(entry)
    highest = [[entry["peak_memory_gb"] for entry in result[2] if "loss" in entry] for result in results]
    assert all(one == highest[0] for one in highest), "of the fullest rank, said by all"


@pytest.mark.parametrize("overlap", ["none", "sub"])
def test_shards(ranks: RankPool, tmp_path: Path, overlap: str) -> None:
    results = ranks.run(train, 2, str(tmp_path), {"tp": 2, "tp_overlap": overlap})
    said, _, history, _ = results[0]
    lines = [line for line in said.splitlines() if LINE.fullmatch(line)]
    assert len(lines) == 2
    for entry in history:
        if "loss" in entry:
            check_breakdown(entry)
            assert entry["tp_exposed_ms"] > 0 and entry["tp_hidden_ms"] >= 0
            assert not {"bubble_ms", "pp_exposed_ms", "dp_exposed_ms"} & set(entry)


def test_a_printer_of_the_user_s_own_gets_everything(tmp_path: Path) -> None:
    said, *_ = train(str(tmp_path), {}, (OwnPrinter,))
    mine = [line for line in said.splitlines() if line.startswith("mine")]
    assert len(mine) == 4 and "'compute_ms'" in mine[0] and "'other_ms'" in mine[0]
    assert len([line for line in said.splitlines() if LINE.fullmatch(line)]) == 2


def test_the_stock_trainer_prints_as_ever(tmp_path: Path) -> None:
    train(str(tmp_path / "ours"), {})
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=1, logging_steps=1, report_to="none"
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        model = models.build(models.MODELS["gpt2"](layers=2))
        transformers.Trainer(model=model, args=args, train_dataset=rows(8), data_collator=collate).train()
    assert out.getvalue().startswith("{'loss': ")
