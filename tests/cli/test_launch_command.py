"""`fold3d launch`: what would be started, hosts that differ, and two "hosts" on this machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fold3d.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SSH = """#!/bin/sh
# Stands for ssh: takes its options off and runs the command here; a host "down" cannot be reached.
while [ "${1#-}" != "$1" ]; do case "$1" in -o) shift 2 ;; *) shift ;; esac; done
[ "$1" = down ] && { echo "ssh: connect to host down port 22: No route to host"; exit 255; }
exec sh -c "$2"
"""
SCRIPT = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}", sys.argv[1:], os.environ.get("MINE"), flush=True)
dist.destroy_process_group()
sys.exit(3 if "fails" in sys.argv and os.environ["GROUP_RANK"] == "1" else 0)
"""
RECIPE = """
[launch]
script = "train.py"
hosts = ["node-0", "me@node-1"]
nproc_per_node = 4
interface = "eth0"
port = 29600

[arguments]
output_dir = "out dir"
dp = 2
pp = 4
save_only_model = true
label_names = ["labels", "more"]
lr_scheduler_kwargs = { min_lr = 1e-3 }

[script]
layers = 4
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.toml").write_text(RECIPE)


def run(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    code = main(shlex.split(line))
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "launch --dry-run -n 4 --env MINE=1 train.py --dp 2 --pp=2 --output_dir out")
    assert code == 0 and err.splitlines() == [
        "4 processes on one host: dp=2, tp=1, pp=2",
        "  this host: ranks 0..3; replicas 0..1, stages 0..1",
    ]
    assert shlex.split(out) == [
        *("env", "MINE=1", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *("train.py", "--dp", "2", "--pp=2", "--output_dir", "out"),
    ]


def test_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "launch --dry-run -n 2 --hosts a,b -m fold3d doctor --size 1")
    assert code == 0
    assert err.splitlines() == ["4 processes on 2 hosts", "  a: ranks 0..1", "  b: ranks 2..3"], "it names no mesh"
    first, second = (shlex.split(shlex.split(line)[-1].partition(" && exec ")[2]) for line in out.splitlines())
    assert first[-7:] == ["--nproc-per-node", "2", "--module", "fold3d", "doctor", "--size", "1"]
    assert second[second.index("--node-rank") + 1] == "1"


def test_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "launch --config run.toml --dry-run")
    assert code == 0, err
    assert "  me@node-1: ranks 4..7; replicas 1, stages 0..3" in err
    for node, line in enumerate(out.splitlines()):
        *ssh, host, command = shlex.split(line)
        assert ssh[0] == "ssh" and host == ("node-0", "me@node-1")[node]
        words = shlex.split(command.partition(" && exec ")[2])
        assert words[:3] == ["env", "GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0"]
        where = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "node-0", "--master-port", "29600"]
        assert words[6:] == [
            *(*where, "--nproc-per-node", "4", "train.py"),
            *("--output_dir", "out dir", "--dp", "2", "--pp", "4", "--save_only_model", "true"),
            *("--label_names", "labels", "more", "--lr_scheduler_kwargs", '{"min_lr": 0.001}', "--layers", "4"),
        ]


def test_what_a_recipe_says_trainingarguments_understand(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from transformers import HfArgumentParser

    import fold3d

    (tmp_path / "run.toml").write_text(RECIPE.replace("dp = 2\npp = 4\n", "use_cpu = true\n").partition("[script]")[0])
    _, out, _ = run(capsys, "launch --config run.toml --hosts a --dry-run")
    words = shlex.split(shlex.split(out)[-1].partition(" && exec ")[2])
    (args,) = HfArgumentParser(fold3d.TrainingArguments).parse_args_into_dataclasses(
        words[words.index("train.py") + 1 :]
    )
    assert args.output_dir == "out dir" and args.save_only_model is True
    assert args.label_names == ["labels", "more"] and args.lr_scheduler_kwargs == {"min_lr": 1e-3}


@pytest.mark.parametrize(
    "line, change, message",
    [
        ("launch -n 4", ("", ""), "which script?"),
        ("launch -n 3 train.py --pp 2", ("", ""), "pp=2 needs 2 processes, or a multiple of them, but the job has 3"),
        ("launch -n 4 train.py --pp 0", ("", ""), "pp=0"),
        ("launch -n 4 --port 99999999 train.py", ("", ""), "--port is 99999999; it must be between 1 and 65535"),
        ("launch -n 4 --hosts a,a train.py", ("", ""), "--hosts=a,a: must be different names"),
        ("launch -n 4 --env MINE train.py", ("", ""), "--env=MINE: must be NAME=VALUE"),
        ("launch -n 4 nowhere.py", ("", ""), "'nowhere.py' is no file here"),
        ("launch --config no.toml", ("", ""), "No such file"),
        (
            "launch --config run.toml",
            ("dp = 2", "dpp = 2"),
            "'dpp' is no name of [arguments]; [script] takes others (did",
        ),
        ("launch --config run.toml", ("hosts =", "host ="), "'host' is no name of [launch] (did you mean 'hosts'?)"),
        ("launch --config run.toml", ("port = 29600", 'port = "x"'), "port='x': must be a int"),
        ("launch --config run.toml", ("port = 29600", "env = [1]"), "env=[1]: must be a list of texts"),
        ("launch -n -3 train.py", ("", ""), "-n is -3: how many processes to start on each host, at least 1"),
        ("launch --config run.toml", ("[script]", "[scripts]"), "'scripts' is no name of the recipe (did you mean"),
    ],
)
def test_errors_teach(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, change: tuple[str, str], message: str
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE.replace(*change, 1) if change[0] else RECIPE)
    code, _, err = run(capsys, line)
    assert code == 1 and message in err, err


def test_in_a_slurm_allocation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"hostnames": "n1\\nn2", "node": "NodeName=n1 NodeAddr=10.0.0.7 State=IDLE"}
    text = "\n".join(f'[ "$2" = {what} ] && printf "{answer}\\n"' for what, answer in said.items())
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{text}\nexit 0\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": "4711", "JOB_NODELIST": "n[1-2]", "CPUS_PER_TASK": "8", "GPUS_ON_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    code, out, err = run(capsys, "launch --dry-run train.py --pp 4")
    assert code == 0 and "4 processes on 2 hosts: dp=1, tp=1, pp=4" in err, err
    words = shlex.split(out)
    assert words[:5] == ["srun", "--kill-on-bad-exit=1", "--ntasks-per-node=1", "--cpus-per-task=8", "bash"]
    assert '--node-rank "$SLURM_NODEID" --master-addr 10.0.0.7 --master-port 24711 --nproc-per-node 2' in words[-1]


def launched(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fold3d", "launch", "-n", "1", *words]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)


def free_port() -> str:
    import socket

    with socket.socket() as one:
        one.bind(("", 0))
        return str(one.getsockname()[1])


@pytest.mark.dist
@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("script", [("train.py",), ("-m", "train")], ids=["file", "module"])
def test_two_hosts(tmp_path: Path, script: tuple[str, ...]) -> None:
    hosts = ("--hosts", "127.0.0.1,localhost", "--port", free_port(), "--env", "MINE=a b")
    done = launched(tmp_path, *hosts, *script, "--pp", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(re.findall(r"^(\S+): rank (\d) of 2 \['--pp', '2'\] a b$", done.stdout, re.M))
    assert found == [("127.0.0.1", "0"), ("localhost", "1")], done.stdout + done.stderr


@pytest.mark.dist
def test_a_host_that_fails_or_cannot_be_reached_ends_the_job(tmp_path: Path) -> None:
    hosts = ("--hosts", "127.0.0.1,localhost", "--port", free_port())
    done = launched(tmp_path, *hosts, "train.py", "fails")
    assert done.returncode != 0 and "localhost ended with code 1; the others end" in done.stderr, done.stderr
    done = launched(tmp_path, "--hosts", "127.0.0.1,down", "train.py")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("fold3d: down: ssh: connect to host down")
    done = launched(tmp_path, "--hosts", "127.0.0.1", "--python", "/nowhere/python", "train.py")
    assert done.returncode == 1 and "is /nowhere/python there, with fold3d?" in done.stderr
