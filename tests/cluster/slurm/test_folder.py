"""What needs no Slurm: the user's files, the job script, what Slurm's commands say."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from fold3d.cli.main import main
from fold3d.cluster.jobs import Place
from fold3d.cluster.rates import Measured, Measurement
from fold3d.cluster.rounds import Ledger
from fold3d.cluster.slurm import commands
from fold3d.cluster.slurm.commands import options, script
from fold3d.cluster.slurm.folder import Folder, On, Wish, parse_on
from fold3d.errors import ConfigError


def wish(tmp_path: Path, **more) -> Wish:
    on = (On("a100", 1, 2, 5.0), On("t4", 2, 1, 2.0))
    return Wish(
        **{
            "name": "a",
            "script": "/b c/train.py",
            "arguments": ("--x", "it's"),
            "on": on,
            "output": str(tmp_path),
            **more,
        }
    )


def test_jobs_are_written_down_and_found_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "folder")
    first, second = wish(tmp_path, submitted=1.0), wish(tmp_path, name="b", submitted=0.5, deadline=9.0, group="g")
    folder.add(first)
    folder.add(second)
    assert folder.wishes() == ([second, first], {}) and math.isinf(folder.wishes()[0][1].deadline)
    with pytest.raises(ConfigError, match="there is a job a: fold3d cluster cancel a, or take another name"):
        folder.add(first)
    (folder.of("a") / "ended").write_text("failed: status 7\n")
    assert folder.ended("a") == "failed: status 7" and folder.ended("b") is None
    folder.remove("a")
    assert folder.wishes() == ([second], {})
    for bad in ("../a", "a b", ".a", "", "x" * 300, "lock", "ledger.json"):
        with pytest.raises(ConfigError, match="is no name for a job"):
            folder.of(bad)


def test_the_ledger_is_kept(tmp_path: Path) -> None:
    folder, here = Folder(tmp_path), Place(("a",), "t4", 2)
    assert folder.ledger() == (Ledger(), 0.0)
    made = Ledger(360.0, {here: 5.0}, {here: -2.5, Place(("b",), "a100", 2): 7.0})
    folder.keep(made, 12.5)
    assert folder.ledger() == (made, 12.5)


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="File exists; set FOLD3D_CLUSTER to a folder that can be made and written"):
        Folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="Not a directory; set FOLD3D_CLUSTER"):
        Folder(tmp_path / "file" / "below")
    folder = Folder(tmp_path)
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="set FOLD3D_CLUSTER"), folder.locked():
        pass
    with pytest.raises(ConfigError, match="file: File exists; take another name"):
        folder.add(wish(tmp_path, name="file"))


def test_two_at_once(tmp_path: Path) -> None:
    first, second = Folder(tmp_path).locked(), Folder(tmp_path).locked()
    with first, pytest.raises(ConfigError, match="another command works in"):
        second.__enter__()
    with Folder(tmp_path).locked():
        pass


def test_where_a_job_may_run(tmp_path: Path) -> None:
    path = tmp_path / "predicted.json"
    path.write_text('{"rates": {"a100:2": 61000, "t4:4": 9000}}')
    assert parse_on(["a100:1x2", "t4:2x1"], None) == (On("a100", 1, 2, 2.0), On("t4", 2, 1, 2.0))
    assert parse_on(["a100:1x2", "t4:2x1"], path) == (On("a100", 1, 2, 61000.0), On("t4", 2, 1, 0.0))
    for bad, message in (
        (["a100"], "--on a100 is no kind of GPU; write KIND:NODESxGPUS"),
        (["a100:0x2"], "--on a100:0x2 is no kind of GPU"),
        (["a100:1x2", "a100:2x1"], "each kind and number of GPUs may be named once"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_on(bad, None)
    with pytest.raises(ConfigError, match="predicts no rate for --on h100:1x8"):
        parse_on(["h100:1x8"], path)


def test_what_was_measured_is_read_from_the_output(tmp_path: Path) -> None:
    made = Measured(rates=(Measurement("t4", 2, 3.0),), left=7.0)
    made.write(tmp_path / "rates.json")
    assert wish(tmp_path).measured() == made


def test_the_job_script(tmp_path: Path) -> None:
    """It is valid, quotes what must be quoted, starts torchrun for Python and nothing but the program else."""
    made, on = wish(tmp_path), On("t4", 2, 1, 2.0)
    text = script(made, on, tmp_path)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        "trap : TERM; torchrun --nnodes" in text
        and "--nproc-per-node 1" in text
        and "FOLD3D_KIND=t4 FOLD3D_GPUS=2" in text
    )
    assert "torchrun" not in script(wish(tmp_path, script="/bin/run"), on, tmp_path)
    words = options(made, on, tmp_path, ("7", "8"))
    assert {"--nodes=2", "--gres=gpu:t4:1", "--comment=fold3d t4:2x1", "--dependency=afterany:7:8"} <= set(words)
    assert not [word for word in options(made, on, tmp_path, ()) if "dependency" in word]


def test_what_slurm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "squeue": "7|a|RUNNING|1-02:03:04|fold3d t4:2x1\n8|b|COMPLETING|0:10|(null)\n9|c|PENDING|0:00|x|y\n",
        "sinfo": "n0|idle|gpu:a100:2\nn0|idle|gpu:a100:2\nn1|mixed|gpu:a100:4(S:0-1),gpu:t4:1\nn2|drained|gpu:t4:8\n",
    }
    monkeypatch.setattr(commands, "_run", lambda *words, **_: said[words[0]])
    assert [(job.id, job.seconds, job.comment) for job in commands.queue()] == [
        ("7", 93784, "fold3d t4:2x1"),
        ("9", 0, "x|y"),
    ]
    assert {kind.name: kind.gpus for kind in commands.gpus().kinds} == {"a100": 6, "t4": 1}
    # Warnings, comments of several lines and empty lines are no jobs; what has no time has run for 0 s.
    said["squeue"] = "squeue: warning\n\n7|x|RUNNING|1:00|two\nlines|of|it\n8|a|RUNNING|INVALID|fold3d t4:2x1\n"
    assert [(job.id, job.seconds) for job in commands.queue()] == [("7", 60), ("8", 0)]
    said["sinfo"] = "warning\n\nn0|idle|gpu:a100:2\nn1|idle|gpu:t4:0\n"
    assert [(kind.name, kind.gpus) for kind in commands.gpus().kinds] == [("a100", 2)]
    said["sinfo"] = "n0|idle|(null)\n"
    with pytest.raises(ConfigError, match="sinfo shows no GPUs with a type"):
        commands.gpus()


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="squeue is not installed"):
        commands.queue()


@pytest.mark.parametrize(
    "line, message",
    [
        ("submit a --on a100:1x2 --output {0} {0}/nothing.py", "is no file"),
        (
            "submit a --on a100:1x2 --output {0} --weight 0 {0}/train.py",
            "--weight is 0; it must be a finite number above 0",
        ),
        (
            "submit a --on a100:1x2 --output {0} --deadline -1 {0}/train.py",
            "--deadline is -1; it must be a finite number above 0",
        ),
        ("submit a --on a100:1x2 --output {0} --deadline inf {0}/train.py", "--deadline is inf; it must be"),
        ("submit a --on a100:1x2 --output {0}/train.py {0}/train.py", "train.py is no folder; name one"),
        *(
            (f"round --every {value}", f"--every is {value}; it must be a finite")
            for value in ("-5", "0", "inf", "nan")
        ),
        ("round --round 0", "--round is 0; it must be a finite number above 0"),
        ("round --policy best", "'best' is no policy"),
        ("cancel a", "there is no job a in"),
    ],
)
def test_what_cannot_work(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOLD3D_CLUSTER", str(tmp_path / "folder"))
    (tmp_path / "train.py").touch()
    assert main(["cluster", *line.format(tmp_path).split()]) == 1
    assert message in capsys.readouterr().err
