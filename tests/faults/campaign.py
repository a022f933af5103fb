"""Runs faults and judges what came of them: `python -m tests.faults.campaign [--write] [PATTERN ...]`.

Each rank is a process of its own, forked from a server that has imported what a training needs. What must hold for each
case: every rank ends within the limit, and those that live say what happened; folders called checkpoint-* are complete;
no process, shared memory or temporary file is left; the same command goes on by itself, and ends with the bits of a
training that nobody disturbed. `--write` puts the results in docs/evidence/faults.md.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fold3d.checkpoint import manifest
from fold3d.errors import CheckpointError
from tests.faults.cases import (
    ENDS,
    GOES_ON,
    IS_PASSED_OVER,
    IS_PREEMPTED,
    IS_REFUSED,
    LAYOUTS,
    RANDOM,
    SPREADS,
    Case,
    cases,
    world_of,
)
from tests.helpers import call

LIMIT = 120.0
"""Seconds until a job that has not ended is a failure, on a machine whose cores are busy."""
LOOK_S = 0.05
NAP = 1.0
"""Seconds for which a rank is stopped that goes on."""
LEAVES_S = 20.0
"""Seconds in which processes end whose parent has ended."""
PAGE = Path(__file__).parents[2] / "docs/evidence/faults.md"
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Ended:
    """How the processes of a job ended."""

    codes: list[int | None]
    """As `Process.exitcode`; None for one that was stopped, or still ran at the limit, and was killed."""
    texts: list[str]
    """What each wrote."""
    seconds: list[float]
    """When each ended, of time.monotonic."""
    left: list[str]
    """Processes, shared memory and temporary files that were left."""

    def report(self) -> str:
        """Returns all that the ranks wrote, for a message."""
        parts = zip(self.codes, self.texts, strict=True)
        return "\n".join(f"--- rank {rank}: exit {code}\n{text[-3000:]}" for rank, (code, text) in enumerate(parts))


def _serve(folder: str, rank: int, world: int, port: int, case: Case | None, layout: str, timeout: float) -> None:
    """Body of a rank's process, which ends as an interpreter does that has run a script."""
    os.setsid()
    call.die_with_parent()
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(call.rank_environment(rank, world, port) | {"OMP_NUM_THREADS": "1", "TMPDIR": f"{folder}/tmp"})
    os.environ.update({"FOLD3D_CACHE": "off", "HF_HUB_OFFLINE": "1"})
    tempfile.tempdir = None
    multiprocessing.set_start_method("fork", force=True)  # as in a script; here it would be that of this process
    code = 0
    try:
        from tests.faults.training import train

        train(folder, case, LAYOUTS[layout], timeout)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        code, sys.last_value = 1, error
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(folder: Path, layout: str, case: Case | None, timeout: float) -> Ended:
    """Runs a job in `folder` to its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded", "tests.faults.training"])
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    (folder / "tmp").mkdir()
    for log in folder.glob("*.log"):
        log.unlink()
    world, port, memory = world_of(layout), call.free_port(), set(SHARED_MEMORY.iterdir())
    processes = []
    for rank in range(world):
        arguments = (str(folder), rank, world, port, case, layout, timeout)
        process = context.Process(target=_serve, args=arguments, daemon=False)
        process.start()
        processes.append(process)
    ends = _wait(processes, case, folder)
    codes = [process.exitcode if rank in ends else None for rank, process in enumerate(processes)]
    left = _left([process for rank, process in enumerate(processes) if rank in ends])
    for process in processes:
        for pid in [*_session(process), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid or 0), signal.SIGKILL)
        process.join()
    left += [f"shared memory {path.name}" for path in set(SHARED_MEMORY.iterdir()) - memory if "fold3d" in path.name]
    if case is None or all(code not in (None, -signal.SIGKILL) for code in codes):  # else nobody can remove them
        left += [f"temporary file {path.name}" for path in (folder / "tmp").iterdir()]
    texts = [log.read_text(errors="replace") if log.exists() else "" for log in _logs(folder, world)]
    return Ended(codes, texts, [ends.get(rank, time.monotonic()) for rank in range(world)], left)


def _left(ended: list[BaseProcess]) -> list[str]:
    """Returns what processes have left that ended: those of a data loader look for their parent every five seconds."""
    deadline = time.monotonic() + LEAVES_S
    while True:
        left = [f"process {pid}" for process in ended for pid in _session(process)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(LOOK_S)


def _logs(folder: Path, world: int) -> list[Path]:
    return [folder / f"{rank}.log" for rank in range(world)]


def _wait(processes: list[BaseProcess], case: Case | None, folder: Path) -> dict[int, float]:
    """Returns when each process ended, without those that are stopped for ever, or still run at the limit."""
    ends: dict[int, float] = {}
    deadline, slept = time.monotonic() + LIMIT, 0.0
    while time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ends and process.exitcode is not None:
                ends[rank] = time.monotonic()
        left = [rank for rank in range(len(processes)) if rank not in ends]
        stopped = [rank for rank in left if _state(processes[rank]) == "T"]
        if left == stopped and not (case is not None and case.kind == "pause" and left):
            break
        if case is not None and case.kind == "pause" and stopped:
            slept += LOOK_S
            if slept >= NAP:
                os.kill(int(processes[stopped[0]].pid or 0), signal.SIGCONT)
        if case is not None and case.moment == "import" and case.outcome == ENDS and case.rank in ends:
            for rank in left:  # as torchrun does: they wait for a rank that they do not know yet
                processes[rank].kill()
        time.sleep(LOOK_S)
    return ends


def _state(process: BaseProcess) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _session(process: BaseProcess) -> list[int]:
    """Returns what lives in the session that the process began, without itself."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != process.pid:
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[3]) == process.pid:
                    found.append(int(entry.name))
    return found


class Campaign:
    """Judges cases against trainings that nobody disturbs, one for each layout, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def undisturbed(self, layout: str) -> Path:
        """Returns the output folder of the layout's training without a fault."""
        folder = self._folder / layout.replace(" ", "-")
        if not folder.exists():
            folder.mkdir(parents=True)
            ended = run(folder, layout, None, 60.0)
            assert ended.codes == [0] * world_of(layout) and not ended.left, (ended.left, ended.report())
        return folder / "out"

    def judge(self, case: Case) -> dict[str, Any]:
        """Runs a case; returns a row of the table. Raises: AssertionError for what must not be."""
        reference = self.undisturbed(case.layout)
        self._count += 1
        folder = self._folder / f"case-{self._count}"
        (folder / "out").mkdir(parents=True)
        if case.outcome in (IS_PASSED_OVER, IS_REFUSED) or case.moment == "loading":
            for name in ("checkpoint-2", "checkpoint-4"):
                shutil.copytree(reference / name, folder / "out" / name)
        if case.outcome in (IS_PASSED_OVER, IS_REFUSED):
            _damage(folder / "out/checkpoint-4" / case.moment, case.kind, self)
        silent = case.kind in ("SIGSTOP", "hang", "busy", "message corrupted")
        ended = run(folder, case.layout, case, 5.0 if silent else 60.0)
        row = {"case": case.name, "kind": case.kind, "moment": case.moment, "layout": case.layout}
        row |= {"outcome": case.outcome, "seconds": self._check(case, ended, folder)}
        if case.outcome != IS_REFUSED:
            self._check_result(case, ended, folder, reference)
        shutil.rmtree(folder)
        return row

    def _check(self, case: Case, ended: Ended, folder: Path) -> float | None:
        """Returns the seconds from the fault until the last living rank had ended; None where it goes on."""
        living = [rank for rank in range(case.world) if rank != case.rank or case.kind not in ("SIGKILL", "SIGSTOP")]
        said = f"{case.name}\n{ended.report()}"
        assert not ended.left, f"{ended.left}, {said}"
        assert all(ended.codes[rank] is not None for rank in living), f"not within {LIMIT:.0f} s: {said}"
        if case.outcome in (GOES_ON, IS_PREEMPTED, IS_PASSED_OVER, SPREADS):
            assert ended.codes == [0] * case.world, said
        else:
            assert all(ended.codes[rank] != 0 for rank in living), said
        if case.outcome == IS_PASSED_OVER:
            assert any("is passed over" in text and re.search(case.pattern, text) for text in ended.texts), said
        if case.outcome in (ENDS, IS_REFUSED):
            telling = [case.rank] if case.moment == "import" else living
            if case.kind == "exit":  # it says nothing itself
                telling = [rank for rank in telling if rank != case.rank]
            assert all(re.search(case.pattern, ended.texts[rank]) for rank in telling), f"{case.pattern}: {said}"
        if case.outcome in (IS_PASSED_OVER, IS_REFUSED):
            return None
        assert (folder / "sprang").exists(), f"the fault did not happen: {said}"
        sprang = float((folder / "sprang").read_text())
        return round(max(ended.seconds[rank] for rank in living) - sprang, 2) if case.outcome == ENDS else None

    def _check_result(self, case: Case, ended: Ended, folder: Path, reference: Path) -> None:
        """The folder is as it must be, now and when the training has gone on in it."""
        out, last = folder / "out", max(_numbers(reference))
        for number in _numbers(out):
            manifest.check(out / f"checkpoint-{number}")
        if case.outcome == IS_PREEMPTED and last not in _numbers(out):
            mark = json.loads((out / "preempted.json").read_text())
            assert mark["checkpoint"] == f"checkpoint-{max(_numbers(out))}", (mark, ended.report())
        if case.kind == "blocked folder":
            (out / "tmp-checkpoint-4").unlink()
        if case.kind == "read-only folder":
            out.chmod(0o755)
        if case.outcome == SPREADS:
            spoilt = out / f"checkpoint-{last}"
            weights = load_file(spoilt / "model.safetensors").values()
            assert all(bool(one.isnan().all()) for one in weights), f"{case.name}: some weights are numbers"
            shutil.rmtree(spoilt)
        if case.outcome not in (GOES_ON, IS_PASSED_OVER) and case.moment != "end":
            layout = case.again or case.layout
            again = run(folder, layout, None, 60.0)
            assert again.codes == [0] * world_of(layout) and not again.left, (case.name, again.left, again.report())
        assert last in _numbers(out), f"{case.name}: {sorted(path.name for path in out.iterdir())}"
        names = {path.name for path in out.iterdir() if not re.fullmatch(r"checkpoint-\d+|runs", path.name)}
        assert not names - ({"preempted.json"} if case.outcome == IS_PREEMPTED else set()), (case.name, names)
        tolerance = 1e-10 if "planned" in case.layout else 1e-12 if case.again else 0.0
        rounding = 1e-6 if case.again else 0.0
        difference = distance(out / f"checkpoint-{last}", reference / f"checkpoint-{last}", rounding)
        assert difference <= tolerance, f"{case.name}: ends with other numbers, by {difference}"

    def foreign(self) -> Path:
        """Returns a checkpoint of another model."""
        folder = self._folder / "foreign"
        if not folder.exists():
            shutil.copytree(self.undisturbed("pp2") / "checkpoint-2", folder)
            tensors = load_file(folder / "model.safetensors")
            from safetensors.torch import save_file

            other = {name: tensor[:-1].clone() if tensor.ndim else tensor for name, tensor in tensors.items()}
            save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


def _numbers(out: Path) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*")}


def _damage(path: Path, kind: str, campaign: Campaign) -> None:
    """Damages a file of a checkpoint."""
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "missing":
        path.unlink()
    elif kind == "foreign":
        shutil.copy(campaign.foreign() / path.name, path)
    else:  # where it can be told: at the beginning of a header or text, at the end of an archive
        place = len(content) - 22 if path.suffix == ".pt" else 0
        content[place] ^= 0x80
        path.write_bytes(content)


def distance(ours: Path, theirs: Path, rounding: float = 0.0) -> float:
    """Returns how far two checkpoints are from each other: weights, the optimizer's state, the losses of all steps.

    Args:
        rounding: by how much losses may differ, which transformers computes in float32.
    """
    found = 0.0
    pairs = [(load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors"))]
    states = [torch.load(folder / "optimizer.pt")["state"] for folder in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    pairs += [(states[0][key], states[1][key]) for key in states[0]]
    for mine, other in pairs:
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            found = max(found, float((tensor.double() - other[name].double()).abs().max()) if tensor.numel() else 0.0)
    logs = [json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (ours, theirs)]
    losses = [{entry["step"]: entry["loss"] for entry in log if "loss" in entry} for log in logs]
    assert losses[0].keys() == losses[1].keys(), losses
    gaps = [abs(value - losses[1][step]) for step, value in losses[0].items()]
    return max(found, *(gap for gap in gaps if gap > rounding), 0.0)


@contextlib.contextmanager
def campaign() -> Iterator[Campaign]:
    """Yields one, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fold3d-faults-") as folder:
        yield Campaign(Path(folder))


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the page of results."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [
        "# Faults",
        "",
        "Each case is a training of six steps on two or four processes, of which one has a fault.",
        f"Of {len(cases())} cases {len(rows)} have run here (`python -m tests.faults.campaign --write`), and",
        f"{sum(row['good'] for row in rows)} ended as they must:",
        "",
        "- Every process that lives ends with an error that names the reason or the process.",
        "- No process, shared memory or temporary file is left, and checkpoints are complete.",
        "- The same command goes on by itself, and ends with the bits of a training that nobody disturbed.",
        "",
        "Seconds are from the fault to the end of the last process, on two cores, beside other jobs.",
        "",
        "| fault | what must come of it | moments | cases | good | seconds, median and longest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in kinds:
        some = [row for row in rows if row["kind"] == kind]
        took = sorted(row["seconds"] for row in some if row["seconds"] is not None)
        seconds = f"{took[len(took) // 2]:.1f}, {took[-1]:.1f}" if took else ""
        named = (f"{RANDOM} moments" if row["moment"].startswith(RANDOM) else row["moment"] for row in some)
        moments = ", ".join(dict.fromkeys(named))
        good = sum(row["good"] for row in some)
        lines.append(f"| {kind} | {some[0]['outcome']} | {moments} | {len(some)} | {good} | {seconds} |")
    return "\n".join(lines) + "\n"


def main(say: Callable[[str], object] = sys.stdout.write) -> int:
    """Runs the cases whose names match a pattern, in the order of the patterns; returns how many went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="parts of names of cases; default: all")
    parser.add_argument("--write", action="store_true", help="put the table of results in docs/evidence/faults.md")
    parser.add_argument("--json", type=Path, help="keep the rows there, run only what is not good among them")
    options = parser.parse_args()
    patterns, names = options.patterns or [""], {one.name: number for number, one in enumerate(cases())}
    chosen = dict.fromkeys(one for part in patterns for one in cases() if part in one.name)
    known = options.json is not None and options.json.exists()
    kept: list[dict[str, Any]] = json.loads(options.json.read_text()) if known else []
    rows = {row["case"]: row for row in kept if row["case"] in names}
    wrong = 0
    with campaign() as judge:
        for case in (one for one in chosen if not rows.get(one.name, {}).get("good")):
            started = time.monotonic()
            row: dict[str, Any] = {"case": case.name, "kind": case.kind, "moment": case.moment, "layout": case.layout}
            row |= {"outcome": case.outcome, "seconds": None, "good": True}
            try:
                row |= judge.judge(case)
            except (AssertionError, CheckpointError, OSError, ValueError) as error:
                row["good"] = False
                say(f"{type(error).__name__}: {error}\n")
            rows[case.name] = row
            wrong += not row["good"]
            say(f"{'good' if row['good'] else 'BAD'} {case.name} {time.monotonic() - started:.1f} s\n")
            sys.stdout.flush()
            if options.json is not None:
                options.json.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    if options.write:
        PAGE.write_text(table(sorted(rows.values(), key=lambda row: names[row["case"]])))
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
