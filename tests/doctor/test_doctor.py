"""`fold3d doctor`: alone, with several ranks, with one that stays silent, and with bad input."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest
import transformers

from fold3d.cli.main import main
from tests.doctor.doctor_script import ALONE
from tests.helpers.launch import launch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.dist
PAGE = ROOT / "docs" / "doctor.md"
SHOWN = re.compile(r"```\n\$ fold3d doctor\n(.*?)```", re.DOTALL)
SCRIPT = Path(__file__).with_name("doctor_script.py")


def labels(text: str) -> list[str]:
    """Returns the lines without what another machine has otherwise: what stands before numbers, names and lists."""
    lines = [line for line in text.splitlines() if not line.startswith("  - ")]
    texts = [line.replace("nothing to change", "to change") for line in lines]
    return ["host" if one.startswith("host ") else re.split(r"[:\d]", one)[0] for one in texts]


def test_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ALONE) == 0
    out = capsys.readouterr().out
    for part in ("CUDA kernels: none", "devices: none but the CPU", "copies, host to host: ", "/dev/shm: "):
        assert part in out
    assert out.splitlines()[-1] == "nothing to change" or "to change:" in out
    assert f"transformers {transformers.__version__}, " in out
    assert "pairs" not in out
    assert re.search(r"locked memory: (unlimited|[\d.]+ [kMGT]?B)\n", out)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ALONE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"][0]["transformers"] == transformers.__version__ and told["ranks"][0]["memory"] > 1e8
    assert {"what", "gbytes", "expected", "remedy"} == set(told["speeds"][0])
    assert all(isinstance(line, str) for line in told["to_change"])


def test_the_page_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Of another machine. Renewed, without this one's names, by FOLD3D_WRITE_DOCS=1."""
    page = PAGE.read_text()
    shown = SHOWN.search(page)
    assert shown is not None
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    if os.environ.get("FOLD3D_WRITE_DOCS") == "1":
        anonymous = re.sub(r"\b(?!127)\d+\.\d+\.\d+\.\d+", "10.0.0.1", out.replace(socket.gethostname(), "node-0"))
        PAGE.write_text(page[: shown.start(1)] + anonymous + page[shown.end(1) :])
        return
    assert labels(shown[1]) == labels(out)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--size", "0"], "--size is 0; it must be positive"),
        (["--size", "1e9"], "--size is 1e+09; it must be positive, and 4096 at most"),
        (["--timeout", "-1"], "--timeout is -1; it must be a positive number"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--device", "cuda"], "torch sees no GPU here"),
    ],
)
def test_bad_values(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert main(["doctor", *words]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x': must be a number"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3, WORLD_SIZE=2: start the processes with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
            "rank 1 does not reach the job's store at 127.0.0.1:9 within 1 s",
        ),
    ],
)
def test_a_strange_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], text: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*ALONE, "--timeout", "1"]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.gate
def test_several_ranks() -> None:
    done = launch(SCRIPT, 4, "well", "-1", timeout=300)
    assert [one.returncode for one in done] == [0] * 4, done.report()
    out = done[0].stdout
    for part in (
        "4 rank(s)",
        "4 ranks: each pair has exchanged messages both ways",
        "pairs within a host, both ways (median of 6): ",
        "all-reduce, sent by each rank: ",
        "reduce-scatter, sent by each rank: ",
        "all-gather, sent by each rank: ",
    ):
        assert part in out, out
    assert all(one.stdout == "" for one in done[1:]), "rank 0 speaks"
    assert not any("Warning" in one.stderr for one in done), done.report()


def test_a_rank_that_does_not_answer_is_named() -> None:
    done = launch(SCRIPT, 3, "silent", "2", timeout=300)
    for one in done[:2]:
        assert one.returncode == 1, done.report()
        assert re.search(r"rank [\d, ]*2 did not answer within 12 s \(looking at the host\)", one.stderr), done.report()


def test_what_to_change_comes_before_what_fails_for_want_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its interface gloo does not connect: the list of what to change came after that, or never."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    done = launch(SCRIPT, 2, "short", "-1", timeout=300)
    assert "does not connect to the others over gloo" in done[0].stderr, done.report()
    assert "GLOO_SOCKET_IFNAME=nowhere0 has no IPv4 address" in done[0].stdout, done.report()
    assert "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, to one of" in done[0].stdout, done.report()
    assert [one.returncode for one in done] == [1, 1]


def test_a_failure_of_one_rank_is_one_of_all() -> None:
    done = launch(SCRIPT, 2, "broken", "1", timeout=300)
    assert "a cable is loose" in done[1].stderr, done.report()
    assert "rank 1" in done[0].stderr + done[0].stdout and "nothing to change" not in done[0].stdout, done.report()
    assert [one.returncode for one in done] == [1, 1]
