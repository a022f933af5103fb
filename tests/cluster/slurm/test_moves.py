"""Rounds on a real Slurm: jobs swap types of GPU, and no step is lost or done twice."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fold3d.cli.main import main
from fold3d.cluster.policies import Policy
from fold3d.cluster.rounds import Rules
from fold3d.cluster.slurm import commands, moves
from fold3d.cluster.slurm.folder import Folder
from tests.helpers.slurm import until

pytest.importorskip("scipy", reason="policies need fold3d[cluster]")

TOY = Path(__file__).with_name("toy")
FAIR, RULES = Policy(name="fair"), Rules(seconds=30.0)


def submit(tmp_path: Path, name: str, *arguments: object) -> Path:
    """Submits a toy that runs on one node with two a100 or on two with a t4 each; returns its output folder."""
    output = tmp_path / name
    words = ["cluster", "submit", name, "--on", "a100:1x2", "--on", "t4:2x1", "--output", str(output), str(TOY)]
    assert main([*words, *map(str, arguments)]) == 0
    return output


def steps(output: Path) -> list[tuple[int, str]]:
    path = output / "steps.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), kind) for step, kind in lines]


def kind_now(output: Path) -> str | None:
    return steps(output)[-1][1] if steps(output) else None


def test_two_jobs_swap_and_a_controller_dies(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = commands.gpus()
    assert {kind.name: kind.gpus for kind in cluster.kinds} == {"a100": 2, "t4": 4}
    outputs = [submit(tmp_path, name, 10**6) for name in ("big", "small")]
    # Two of the four t4 are somebody else's: each job has one kind, and they take turns.
    cluster = type(cluster).parse("a100:2,t4:2")
    assert moves.hold(folder, FAIR, cluster, RULES).moved == 2
    assert until(lambda: all(len(steps(output)) > 5 for output in outputs))
    first = [kind_now(output) for output in outputs]
    assert set(first) == {"a100", "t4"}

    with monkeypatch.context() as dying:
        dying.setattr(commands, "cancel", lambda ids: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            moves.hold(folder, FAIR, cluster, RULES)
    assert len(commands.queue()) == 4, "the old ones run, the new ones wait for their end"
    placed = moves.hold(folder, FAIR, cluster, RULES).placed
    wanted = [placed[output.name].kind for output in outputs]
    assert until(lambda: [kind_now(output) for output in outputs] == wanted and len(commands.queue()) == 2)
    # Without that accident: back again.
    placed = moves.hold(folder, FAIR, cluster, RULES).placed
    wanted = [placed[output.name].kind for output in outputs]
    assert until(lambda: [kind_now(output) for output in outputs] == wanted)
    assert until(lambda: len(commands.queue()) == 2)
    for output in outputs:
        done = [step for step, _ in steps(output)]
        assert done == list(range(1, len(done) + 1)), "every step once"
    assert {kind for output in outputs for _, kind in steps(output)} == {"a100", "t4"}


def test_what_has_ended_is_not_started_again(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [submit(tmp_path, "done", 3), submit(tmp_path, "crashed", 3, 7)]
    capsys.readouterr()
    assert main(["cluster", "round", "--policy", "fair"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("fair: crashed on 2 x ") and said.endswith("; 2 started or moved\n")
    assert until(lambda: all(folder.ended(output.name) for output in outputs))
    assert [folder.ended(output.name) for output in outputs] == ["done", "failed: status 7"]
    held = moves.hold(folder, FAIR, commands.gpus(), RULES)
    assert (held.placed, held.moved, held.left_out) == ({}, 0, {})
    capsys.readouterr()
    assert main(["cluster", "status"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["job", "done", "crashed"] and "failed: status 7" in rows[2]
    assert main(["cluster", "cancel", "nobody"]) == 1 and "there is no job nobody" in capsys.readouterr().err


def test_a_job_that_the_site_preempts_is_requeued_and_goes_on(folder: Folder, tmp_path: Path) -> None:
    output = submit(tmp_path, "guest", 10**6)
    moves.hold(folder, FAIR, type(commands.gpus()).parse("a100:2"), RULES)
    assert until(lambda: len(steps(output)) > 3)
    words = ["sbatch", "--parsable", "--partition=high", "--gres=gpu:a100:2", "--nodes=1", "--output=/dev/null"]
    host = subprocess.run([*words, "--wrap=sleep 1"], capture_output=True, text=True, timeout=60)
    assert host.returncode == 0, host.stderr
    assert until(lambda: (output / "preempted.json").exists())
    assert until(lambda: [job.state for job in commands.queue() if job.name == "guest"] == ["PENDING"])
    before = len(steps(output))
    # Slurm starts what was requeued two minutes later; its owner may say: now.
    (guest,) = [job for job in commands.queue() if job.name == "guest"]
    now = ["scontrol", "update", f"JobId={guest.id}", "StartTime=now"]
    assert until(lambda: subprocess.run(now, capture_output=True, timeout=60).returncode == 0)
    assert until(lambda: len(steps(output)) > before)
    assert [step for step, _ in steps(output)] == list(range(1, len(steps(output)) + 1))
    assert not (output / "preempted.json").exists() and folder.ended("guest") is None
