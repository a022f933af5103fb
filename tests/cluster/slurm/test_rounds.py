"""Rounds of many jobs of which one cannot be had: it is left as it is, a line says why, and the others go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fold3d.cli.main import main
from fold3d.cluster.slurm import commands
from fold3d.cluster.slurm.folder import Folder
from fold3d.errors import ConfigError

pytest.importorskip("scipy", reason="policies need fold3d[cluster]")


class Slurm:
    """Answers as Slurm's commands do, for nodes with 2 a100 and 2 t4; jobs that are submitted run at once."""

    def __init__(self) -> None:
        self.nodes = "a0|idle|gpu:a100:2(S:0)\nt0|idle|gpu:t4:2\n"
        self.jobs: dict[str, str] = {}
        """Lines of squeue, by id."""
        self.calls: list[tuple[str, ...]] = []
        self.refused = ""
        """The name of the job that sbatch refuses."""
        self.down: set[str] = set()
        """Commands that fail."""

    def __call__(self, *words: str, input: str | None = None) -> str:
        if words[0] in self.down:
            raise ConfigError(f"{words[0]}: Unable to contact slurm controller")
        if words[0] == "sinfo":
            return self.nodes
        if words[0] == "squeue":
            return "".join(f"{line}\n" for line in self.jobs.values())
        self.calls.append(words)
        if words[0] == "scancel":
            for id in words[1:]:
                del self.jobs[id]
            return ""
        said = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        if said["job-name"] == self.refused:
            raise ConfigError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        return self.run(said["job-name"], said["comment"])

    def run(self, name: str, comment: str) -> str:
        id = str(len(self.calls) + 100)
        self.jobs[id] = f"{id}|{name}|RUNNING|10:00|{comment}"
        return id

    def on(self, name: str) -> list[str]:
        """Returns the places of a job."""
        return [line.split("fold3d ")[1] for line in self.jobs.values() if line.split("|")[1] == name]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    monkeypatch.setattr(commands, "_run", made)
    monkeypatch.setenv("FOLD3D_CLUSTER", str(tmp_path / "folder"))
    (tmp_path / "train.py").touch()
    return made


def submit(tmp_path: Path, name: str, *on: str) -> Path:
    output = tmp_path / "out" / name
    output.mkdir(parents=True)
    words = ["cluster", "submit", name, "--output", str(output), *(word for one in on for word in ("--on", one))]
    assert main([*words, str(tmp_path / "train.py")]) == 0
    return output


def hold(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["cluster", "round", *words]) == 0
    return capsys.readouterr().out


def broken_rates(tmp_path: Path, slurm: Slurm) -> None:
    output = submit(tmp_path, "odd", "a100:1x1")
    rate = {"kind": "a100", "gpus": 1, "rate": 0}
    told = {"version": 1, "rates": [rate], "save_seconds": 1, "start_seconds": 1, "done": 1, "left": None}
    (output / "rates.json").write_text(json.dumps(told))


def other_unit(tmp_path: Path, slurm: Slurm) -> None:
    output = submit(tmp_path, "odd", "a100:1x1")
    rate = {"kind": "a100", "gpus": 1, "rate": 1e25}
    told = {"version": 1, "rates": [rate], "save_seconds": 1, "start_seconds": 1, "done": 1, "left": None}
    (output / "rates.json").write_text(json.dumps(told))


def damaged_job(tmp_path: Path, slurm: Slurm) -> None:
    submit(tmp_path, "odd", "a100:1x1")
    (Folder().of("odd") / "job.json").write_text('{"on": ')


def ended_unreadable(tmp_path: Path, slurm: Slurm) -> None:
    submit(tmp_path, "odd", "a100:1x1")
    (Folder().of("odd") / "ended").mkdir()


def refused(tmp_path: Path, slurm: Slurm) -> None:
    submit(tmp_path, "odd", "a100:1x1")
    slurm.refused = "odd"


ODD: dict[str, tuple[Callable[[Path, Slurm], object], str]] = {
    "unknown kind": (
        lambda tmp_path, _: submit(tmp_path, "odd", "h100:1x1"),
        "job odd can run nowhere here: it asks for h100 x1 at 1; there are a100 x2, t4 x2",
    ),
    "too large": (lambda tmp_path, _: submit(tmp_path, "odd", "a100:4x2"), "it asks for a100 x8"),
    "measured 0": (broken_rates, "rates[0].rate is 0; it must be a finite number above 0"),
    "measured in another unit": (other_unit, "they must be in the same unit"),
    "damaged job": (damaged_job, "fold3d cluster cancel odd, and submit it again"),
    "unreadable end": (ended_unreadable, "Is a directory; fold3d cluster cancel odd"),
    "refused": (refused, "QOSMaxSubmitJobPerUserLimit"),
}


@pytest.mark.parametrize("case", ODD)
def test_the_others_go_on(case: str, slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, reason = ODD[case]
    make(tmp_path, slurm)
    submit(tmp_path, "good", "a100:1x1")
    said = hold(capsys)
    assert said.startswith("odd is left as it is: ") and reason in said
    assert said.endswith("fair: good on 1 x a100; 1 started or moved\n")
    assert slurm.on("good") == ["a100:1x1"] and not slurm.on("odd")
    assert hold(capsys).endswith("fair: good on 1 x a100; 0 started or moved\n")
    assert main(["cluster", "status"]) == 0 and "good" in capsys.readouterr().out
    assert main(["cluster", "cancel", "odd"]) == 0


def test_a_job_without_its_gpus_runs_on_and_keeps_them(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rates.json breaks while it has both a100: they are nobody else's, and its debts are kept."""
    output = submit(tmp_path, "odd", "a100:1x2")
    assert "odd on 2 x a100; 1 started" in hold(capsys)
    (output / "rates.json").write_text("{")
    submit(tmp_path, "good", "a100:1x2", "t4:1x2")
    assert hold(capsys).endswith("fair: good on 2 x t4; 1 started or moved\n")
    submit(tmp_path, "late", "a100:1x1")
    said = hold(capsys)
    assert "late is left as it is: job late can run nowhere here" in said
    assert (slurm.on("odd"), slurm.on("good"), slurm.on("late")) == (["a100:1x2"], ["t4:1x2"], [])
    (output / "rates.json").unlink()
    assert "left as it is" not in hold(capsys)


def test_nodes_that_are_down_for_a_while(slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, on in (("tee", "t4:1x1"), ("good", "a100:1x1")):
        submit(tmp_path, name, on)
    assert "2 started" in hold(capsys)
    up, slurm.nodes = slurm.nodes, slurm.nodes.replace("t0|idle", "t0|down*")
    assert "tee is left as it is: job tee can run nowhere here" in hold(capsys)
    slurm.nodes = up
    assert hold(capsys) == "fair: good on 1 x a100, tee on 1 x t4; 0 started or moved\n"
    assert [call[0] for call in slurm.calls] == ["sbatch", "sbatch"], "nothing was cancelled"


def test_a_refused_move(slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two jobs should swap, and sbatch refuses one: it runs on, the other moves, and waits for no job but its own."""
    for name in ("a", "b"):
        submit(tmp_path, name, "a100:1x2", "t4:1x2")
    slurm.run("a", "fold3d a100:1x2")
    (first,) = slurm.jobs
    slurm.calls.append(("between",))
    slurm.run("b", "fold3d t4:1x2")
    second = next(id for id in slurm.jobs if id != first)
    slurm.refused = "b"
    # What a has received on the a100, b is due.
    path = Folder().path / "ledger.json"
    entries = [[["a"], "a100", 2, 9000.0], [["b"], "t4", 2, 9000.0]]
    path.write_text(json.dumps({"seconds": 1000.0, "until": time.time(), "received": entries, "debts": []}))
    said = hold(capsys)
    assert "b is left as it is: sbatch: error: QOSMax" in said and "1 started or moved" in said
    started = [call for call in slurm.calls if call[0] == "sbatch" and "--job-name=a" in call]
    assert [word for word in started[0] if "dependency" in word] == [f"--dependency=afterany:{first}"]
    assert ("scancel", first) in slurm.calls and second in slurm.jobs


def test_rounds_for_ever_outlive_slurmctld(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sinfo fails in the second round, squeue in the third; the fourth is held. In the first it is an error."""
    submit(tmp_path, "good", "a100:1x1")
    paused: list[float] = []

    def sleep(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 4:
            raise KeyboardInterrupt
        slurm.down = [{"sinfo"}, {"squeue"}, set()][len(paused) - 1]

    monkeypatch.setattr(time, "sleep", sleep)
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        main(["cluster", "round", "--every", "60"])
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "fair",
        *["this round failed, the next is in 60 s"] * 2,
        "fair",
    ]
    assert all(0.0 < one <= 60.0 for one in paused)
    slurm.down = {"sinfo"}
    assert main(["cluster", "round", "--every", "60"]) == 1
