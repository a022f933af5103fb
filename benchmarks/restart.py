"""How long it takes from a rank's death to the next step, and where that time goes.

    python -m benchmarks.restart [--dp 2] [--pp 2] [--segments 1|auto] [--hidden 256] [--layers 8] [--async-save]
        [--json FILE]

Trains a GPT-2 under torchrun with --max-restarts 1, resume="auto" and a checkpoint every other step. In the fifth step
one process kills itself. Each process notes when it comes by; every line below is the longest of all processes, from
the end of the line before:

stop     torchrun has seen it, and the other processes have ended
start    new processes run
import   torch, transformers and fold3d are imported
connect  the arguments are there, and the processes know each other
make     the model (without values) and the Trainer are there
plan     the model is recorded, planned (segments="auto") and cut
load     weights, the optimizer's state and the random numbers are there
step     the first step has ended
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.local import gpt2

DIES_IN = 5
PHASES = ("stop", "start", "import", "connect", "make", "plan", "load", "step")


def note(folder: str, what: str, at: float | None = None) -> None:
    """Leaves a line; times are of the clock that all processes of the machine share."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    line = {"attempt": attempt, "rank": int(os.environ["RANK"]), "what": what, "at": at or time.monotonic()}
    with open(f"{folder}/notes-{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def started() -> float:
    """Returns when this process began, of time.monotonic."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return since_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def work(options: argparse.Namespace) -> None:
    """A script as users write it, which notes where it is."""
    note(options.folder, "start", started())
    import atexit

    from transformers import TrainerCallback

    import fold3d

    note(options.folder, "import")
    atexit.register(note, options.folder, "stop")
    args = gpt2.arguments(
        options,
        f"{options.folder}/out",
        save_every=2,
        segments=options.segments,
        gradient_accumulation_steps=2 * options.pp,
        resume="auto",
    )
    note(options.folder, "connect")

    class Notes(TrainerCallback):  # type: ignore[misc]
        reads_gradients = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == DIES_IN - 1 and args.process_index == 1 and not restarts():
                note(options.folder, "dead")
                os.kill(os.getpid(), signal.SIGKILL)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            note(options.folder, "step")

    trainer = fold3d.Trainer(model=gpt2.model(options), args=args, train_dataset=gpt2.samples(64), callbacks=[Notes()])
    note(options.folder, "make")
    # What waits to be loaded is loaded when the model has been cut: the last on this list notes that.
    trainer.engine.on_build.insert(0, lambda: note(options.folder, "plan"))
    trainer.engine.on_build.append(lambda: note(options.folder, "load"))
    trainer.train()
    trainer.end()


def restarts() -> int:
    """Returns how often torchrun has started the processes anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def phases(folder: Path) -> dict[str, float]:
    """Returns the seconds of each phase of PHASES, from the death on."""
    notes = [json.loads(line) for path in folder.glob("notes-*.jsonl") for line in path.read_text().splitlines()]
    now = next(one["at"] for one in notes if one["what"] == "dead")
    found: dict[str, float] = {}
    for phase in PHASES:
        attempt = 0 if phase == "stop" else 1
        by_rank: dict[int, float] = {}
        for one in notes:
            if (one["attempt"], one["what"]) == (attempt, phase) and one["at"] > now - 1e3:
                by_rank.setdefault(one["rank"], one["at"])  # of steps the first one
        then = max(by_rank.values(), default=now)
        found[phase], now = max(0.0, then - now), max(now, then)
    return found


def main() -> None:
    """Prints the phases of one restart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpt2.add_options(parser, hidden=256, layers=8, steps=8)
    parser.add_argument("--segments", default="1")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
        command = [*torchrun, "--nproc-per-node", str(options.dp * options.pp), "-m", "benchmarks.restart"]
        subprocess.run(
            [*command, *sys.argv[1:], "--folder", folder], check=True, timeout=1200, env=os.environ | _ONE_THREAD
        )
        found = phases(Path(folder))
    for phase, seconds in found.items():
        print(f"{phase:8} {seconds:6.2f} s")
    print(f"{'in all':8} {sum(found.values()):6.2f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


_ONE_THREAD = {"OMP_NUM_THREADS": "1"}

if __name__ == "__main__":
    main()
