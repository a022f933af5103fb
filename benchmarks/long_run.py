"""Whether a long training stays as it is: memory, descriptors, threads, temporary files and the time of a step.

    python -m benchmarks.long_run [--steps 20000] [--dp 2] [--pp 2] [--json FILE]

Trains a tiny GPT-2 with an evaluation and an asynchronous checkpoint every 100 steps. Prints a line for each tenth of
the steps, of the process that has the most. Ends with exit code 1 if anything but the time of a step is more in the
last tenth than in the third.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import fold3d
from benchmarks.local import gpt2
from benchmarks.local.ranks import run_ranks

EVERY, TENTHS = 100, 10
ALLOWED = {"resident_mb": 8.0, "descriptors": 0, "threads": 0, "temporary_files": 0}
"""By how much the last tenth may be above the third; the allocator of the C library rounds."""


class Watch(TrainerCallback):
    """What this process has at the end of each tenth, and how long its steps took."""

    reads_gradients = False

    def __init__(self, temporary: Path) -> None:
        self.rows: list[dict[str, float]] = []
        self._temporary, self._steps = temporary, list[float]()
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """It has ended."""
        self._steps.append(time.perf_counter() - self._began)
        if state.global_step % (state.max_steps // TENTHS):
            return
        status = Path("/proc/self/status").read_text().splitlines()
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        self.rows.append(
            {
                "step": state.global_step,
                "step_ms": statistics.median(self._steps) * 1e3,
                "resident_mb": resident / 1024,
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task"))
                - sum(t.name == "fold3d save" for t in threading.enumerate()),
                "temporary_files": sum(1 for _ in self._temporary.rglob("*")),
            }
        )
        self._steps.clear()


def work(options: argparse.Namespace, folder: str) -> list[dict[str, float]]:
    """One process."""
    temporary = Path(folder) / "tmp"
    tempfile.tempdir = str(temporary)
    args = gpt2.arguments(
        options,
        f"{folder}/out",
        save_every=EVERY,
        eval_strategy="steps",
        eval_steps=EVERY,
        save_total_limit=2,
        logging_steps=EVERY,
    )
    data = gpt2.samples(512)
    watch = Watch(temporary)
    trainer = fold3d.Trainer(
        model=gpt2.model(options), args=args, train_dataset=data, eval_dataset=data[:8], callbacks=[watch]
    )
    trainer.train()
    trainer.end()
    return watch.rows


def main() -> int:
    """Prints the lines; returns how many numbers have grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpt2.add_options(parser, hidden=32, layers=4, steps=20000)
    parser.set_defaults(async_save=True)
    options = parser.parse_args()
    if options.steps % TENTHS:
        parser.error(f"--steps must be a multiple of {TENTHS}")
    folder = tempfile.mkdtemp()
    (Path(folder) / "tmp").mkdir()
    try:
        ranks = run_ranks(work, options.dp * options.pp, options, folder, timeout=24 * 3600.0)
    finally:
        shutil.rmtree(folder)
    rows = [{name: max(row[name] for row in some) for name in some[0]} for some in zip(*ranks, strict=True)]
    for row in rows:
        print("; ".join(f"{name} {value:,.1f}" for name, value in row.items()))
    grown = {name: rows[-1][name] - rows[2][name] for name in ALLOWED}
    bad = {name: value for name, value in grown.items() if value > ALLOWED[name]}
    print(f"grown since the third tenth: {grown}; more than allowed: {bad or 'nothing'}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return len(bad)


if __name__ == "__main__":
    sys.exit(main() > 0)
