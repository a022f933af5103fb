"""Trainings on a real Slurm: the script of docs/several-nodes.md, that of `fold3d cost`, and two jobs that swap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fold3d.cli.main import main
from fold3d.cluster import devices, launch
from fold3d.cluster.cost import MachinePlan, Terms, offers
from fold3d.cluster.jobs import Cluster
from fold3d.cluster.policies import Policy
from fold3d.cluster.rates import Measured
from fold3d.cluster.rounds import Rules
from fold3d.cluster.slurm import commands, moves
from fold3d.cluster.slurm.folder import Folder
from tests.cluster.slurm.train import Losses, job
from tests.helpers import pages
from tests.helpers.example import DRAWN, EXAMPLE, TINY
from tests.helpers.slurm import until
from tests.trainer.jobs import run_fold3d

ROOT = Path(__file__).parents[3]
SCRIPT, TOY = Path(__file__).with_name("train.py"), Path(__file__).with_name("toy")
FAIR, RULES = Policy(name="fair"), Rules(seconds=30.0)


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Slurm hands on to jobs: torchrun, the tests' modules, a core for each process."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def batch(script: str, output: Path) -> None:
    """Runs a script by sbatch, and waits for its end."""
    words = ("sbatch", "--wait", f"--output={output}")
    done = subprocess.run(words, input=script, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr + (output.read_text() if output.exists() else "")


@pytest.mark.full
@pytest.mark.usefixtures("_slurm", "_environment")
@pytest.mark.parametrize("launcher", ["fold3d launch", "torchrun"])
def test_the_script_of_the_page(tmp_path: Path, launcher: str) -> None:
    """Numbers of nodes, GPUs and cores are those of this Slurm, and the example is in the place of train.py."""
    scripts = (code for code in pages.blocks(ROOT / "docs" / "several-nodes.md", "bash") if "#SBATCH" in code)
    (script,) = (code for code in scripts if launcher in code)
    example = " ".join([str(EXAMPLE), *TINY, *DRAWN, "--use_cpu"])
    own = (("--nproc-per-node 4", "--nproc-per-node 1"), ("IFNAME=eth0", "IFNAME=lo"))
    for wanted, instead in (
        *(own if launcher == "torchrun" else (("--interface eth0", "--interface lo"),)),
        ("--nodes=4", "--nodes=2"),
        ("--gpus-per-node=4", "--gpus-per-node=1"),
        ("--cpus-per-task=32", "--cpus-per-task=2"),
        ("train.py --dp 4 --pp 4 --gradient_accumulation_steps 16 --save_steps 500", f"{example} --dp 1 --pp 2"),
        ("OMP_NUM_THREADS=8", "OMP_NUM_THREADS=1"),
        ("/shared/out", str(tmp_path / "out")),
    ):
        assert wanted in script, wanted
        script = script.replace(wanted, instead)
    batch(script, tmp_path / "said.txt")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0


@pytest.mark.full
@pytest.mark.usefixtures("_slurm")
def test_the_script_of_fold3d_cost(tmp_path: Path) -> None:
    """Two t4 machines with a GPU each: what counts steps in place of a training has both."""
    machine = devices.Machine(
        device="t4", gpus=1, price=1.0, spot=None, tflops=65.0, memory_gb=16.0, within_gbit=128.0, network_gbit=10.0,
        accelerator="T4", cloud="", count=2,
    )  # fmt: skip
    terms = Terms(tokens=1e6, deadline=100.0, restart=0.1, up=8.0, down=2.0)
    (offer,) = offers([MachinePlan(machine=machine, rate=1e3, flags="--dp 2")], Measured(), terms)
    output = tmp_path / "out"
    output.mkdir()
    batch(launch.sbatch(offer, [str(TOY), "3", "0"], str(output)), tmp_path / "said.txt")
    assert (output / "steps.txt").read_text() == "1 t4\n2 t4\n3 t4\n" and (output / "ended").read_text() == "done\n"


def losses(output: Path) -> list[tuple[int, float, str]]:
    path = output / "losses.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(step), float(loss), kind) for step, loss, kind in lines]


@pytest.mark.full
@pytest.mark.usefixtures("_environment")
def test_two_trainings_swap_twice_and_a_controller_dies(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pp=2 on a node with two a100, dp=2 over two nodes with a t4 each, and back: every step once, and its loss that of
    a training in one process that nobody disturbed."""
    cluster = Cluster.parse("a100:2,t4:2")
    outputs = [tmp_path / name for name in ("big", "small")]
    for output in outputs:
        words = ["cluster", "submit", output.name, "--on", "a100:1x2", "--on", "t4:2x1", "--output", str(output)]
        assert main([*words, str(SCRIPT), str(output)]) == 0

    def on_their_way(wanted: dict[str, Any], before: dict[Path, int]) -> bool:
        """Whether both have made steps where they were put."""
        now = {output: losses(output) for output in outputs}
        return all(len(now[one]) > before[one] + 2 and now[one][-1][2] == wanted[one.name].kind for one in outputs)

    def hold() -> None:
        before = {output: len(losses(output)) for output in outputs}
        placed = moves.hold(folder, FAIR, cluster, RULES).placed
        said = [(folder.of(one.name) / "out.txt") for one in outputs]
        assert until(lambda: on_their_way(placed, before), 240.0), [p.exists() and p.read_text() for p in said]

    hold()
    first = {output: losses(output)[-1][2] for output in outputs}
    with monkeypatch.context() as dying:
        dying.setattr(commands, "cancel", lambda ids: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            moves.hold(folder, FAIR, cluster, RULES)
    assert len(commands.queue()) == 4, "the old ones run, the new ones wait for their end"
    hold()
    assert all(losses(output)[-1][2] != first[output] for output in outputs)
    hold()
    assert {output: losses(output)[-1][2] for output in outputs} == first
    for output in outputs:
        assert main(["cluster", "cancel", output.name]) == 0
    assert until(lambda: not commands.queue())

    made = {output: losses(output) for output in outputs}
    last = max(step for lines in made.values() for step, _, _ in lines)
    alone = Losses(None, "", last)
    run_fold3d(job(tmp_path / "alone", alone, 1), {})
    expected = dict(alone.lines)
    for lines in made.values():
        assert [step for step, _, _ in lines] == list(range(1, len(lines) + 1)), "every step once"
        assert {kind for _, _, kind in lines} == {"a100", "t4"}
        for step, loss, _ in lines:
            assert loss == pytest.approx(expected[step], rel=1e-12), step
