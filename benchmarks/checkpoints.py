"""How long a checkpoint stops the training, what each process writes for it, and the memory it takes.

    python -m benchmarks.checkpoints [--dp 2] [--pp 2] [--hidden 1024] [--layers 19] [--async-save] [--folder DIR]
        [--every STEPS] [--json FILE]

Trains a GPT-2 in float32 (with the defaults 1.0 GB of weights, 3.0 GB with AdamW's state) on dp * pp processes of this
machine, with dp_sync="zero1", and saves after every second step, or after so many. With --async-save a save waits for
the one before, so let there be more steps between them than writing takes. Seconds are the longest that a process was
in the Trainer's saving, and those that its training thread computed there; "written" what it handed to the file system;
"sent" what went over the loopback, on all processes together; memory how much more than before the save a process had
at most.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import fold3d
from benchmarks.local import gpt2
from benchmarks.local.ranks import run_ranks

SAVE_EVERY = 2


def of_process(name: str, key: str) -> int:
    """Returns a number of /proc/self, in bytes."""
    line = next(one for one in Path(f"/proc/self/{name}").read_text().splitlines() if one.startswith(key))
    return int(line.split()[1]) * (1024 if line.endswith("kB") else 1)


def over_loopback() -> int:
    """Returns the bytes that have gone over this machine's loopback."""
    line = next(one for one in Path("/proc/net/dev").read_text().splitlines() if one.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


class Watch(TrainerCallback):
    """What the saves of a training have cost this process."""

    reads_gradients = False

    def __init__(self) -> None:
        self.stopped: dict[int, float] = {}
        self.computed: dict[int, float] = {}
        self.until_complete: dict[int, float] = {}
        self.steps: dict[int, float] = {}
        self.written: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self.more_memory: dict[int, int] = {}
        self._began = self._saved = 0.0
        self._step = self._depth = 0

    def watch(self, trainer: Any) -> None:
        """Takes the time of the methods of `trainer` that save, whether they write or wait."""
        for name in ("_save_checkpoint", "_commit", "_wait_for_copies"):
            if hasattr(trainer, name):
                setattr(trainer, name, self._timed(trainer, getattr(trainer, name), name == "_save_checkpoint"))

    def _timed(self, trainer: Any, method: Any, begins: bool) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            if begins:
                self._step, self._saved = trainer.state.global_step, time.perf_counter()
                self._memory, self._bytes = of_process("status", "VmRSS"), of_process("io", "wchar")
                self._loopback = over_loopback()
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            started, self._depth = (time.perf_counter(), time.thread_time()), self._depth + 1
            try:
                return method(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:  # else it is counted outside
                    self.stopped[self._step] = self.stopped.get(self._step, 0.0) + time.perf_counter() - started[0]
                    self.computed[self._step] = self.computed.get(self._step, 0.0) + time.thread_time() - started[1]

        return timed

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The checkpoint is complete."""
        self.until_complete[self._step] = time.perf_counter() - self._saved
        self.more_memory[self._step] = of_process("status", "VmHWM") - self._memory
        self.written[self._step] = of_process("io", "wchar") - self._bytes
        self.sent[self._step] = over_loopback() - self._loopback

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """It has ended."""
        self.steps[state.global_step] = time.perf_counter() - self._began


def work(options: argparse.Namespace, folder: str) -> Watch:
    """One process."""
    args = gpt2.arguments(options, folder, save_every=options.every, schedule="1f1b", save_total_limit=1)
    watch = Watch()
    trainer = fold3d.Trainer(model=gpt2.model(options), args=args, train_dataset=gpt2.samples(64), callbacks=[watch])
    watch.watch(trainer)
    trainer.train()
    trainer.engine.close()
    return watch


def main() -> None:
    """Prints a line for each save but the first, which finds no memory that an earlier one has used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpt2.add_options(parser, hidden=1024, layers=19, steps=8)
    parser.add_argument("--every", type=int, default=SAVE_EVERY, help="steps between saves; default 2")
    parser.add_argument("--folder", help="on the disk to measure; default: a temporary one")
    options = parser.parse_args()
    size = sum(one.numel() for one in gpt2.model(options).parameters()) * 4
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        watches: list[Watch] = run_ranks(work, options.dp * options.pp, options, folder)
    finally:
        shutil.rmtree(folder)
    first = watches[0]
    rows = [
        {
            "step": step,
            "stopped_s": round(max(watch.stopped[step] for watch in watches), 3),
            "computed_s": round(max(watch.computed[step] for watch in watches), 3),
            "until_complete_s": round(max(watch.until_complete[step] for watch in watches), 3),
            "written_mb": [round(watch.written[step] / 1e6, 1) for watch in watches],
            "sent_mb": round(max(watch.sent[step] for watch in watches) / 1e6, 1),
            "more_memory_mb": [round(watch.more_memory[step] / 1e6, 1) for watch in watches],
        }
        for step in sorted(first.until_complete)[1:]
    ]
    steps = sorted((first.steps[step], step) for step in first.steps if step > 1)
    print(f"weights {size / 1e6:,.0f} MB; steps of {steps[0][0]:.2f} to {steps[-1][0]:.2f} s")
    for row in rows:
        print("; ".join(f"{name} {value}" for name, value in row.items()))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"weights_bytes": size, "steps": first.steps, "saves": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
