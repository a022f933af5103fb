"""`fold3d simulate`, as a user types it."""

from __future__ import annotations

import shlex

import pytest

from fold3d import schedule
from fold3d.cli.main import main


def run(capsys, line: str) -> tuple[int, str, str]:
    code = main(shlex.split(line))
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_breakdown(capsys):
    code, out, err = run(
        capsys,
        "simulate aiao -p 2 -m 8 -s 4 --dp-sync serial --forward 10 --backward 20 --layers 8 "
        "--gradients 50 --bandwidth 8 --activation 0 --latency 0",
    )
    assert code == 0 and not err
    first, *_, rank0, rank1 = out.splitlines()
    assert first.startswith("pp=2 segments=4 m=8: step 297.50 ms, 20.2 % over the limit")
    assert rank0.split() == ["rank", "0", "240.00", "7.50", "0.00", "50.00", "0.00"]
    assert rank1.split()[2:] == rank0.split()[2:]


def test_early_says_how_many_and_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "simulate aiao -p 2 -m 4 -s 2 --dp-sync early --gradients 400 --png out.png")
    assert code == 0 and "gathers begun before the last reduce-scatter: " in out and out.endswith("out.png\n")
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule.save_csv(schedule.generate("interleaved", pp=2, segments=2, micro_batches=3), "mine.csv")
    code, out, _ = run(capsys, "simulate mine.csv --dp 4")
    assert code == 0 and out.startswith("pp=2 segments=2 m=3: step ")


@pytest.mark.parametrize(
    "line, message",
    [
        ("simulate aiao -p 2", "--micro-batches is missing, as in: fold3d simulate aiao -p 4 -m 8"),
        ("simulate aiao -p 2 -m 2 -s 4 --layers 3", "3 layers per rank cannot be cut into 4 segments"),
        ("simulate aiao -p 2 -m 2 --forward 0", "--forward is 0"),
        ("simulate aiao -p 2 -m 2 --bandwidth 0", "bandwidth"),
    ],
)
def test_errors(capsys, line, message):
    code, out, err = run(capsys, line)
    assert code == 1 and not out and message in err
