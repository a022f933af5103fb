"""`fold3d draw`, `schedules` and `validate`, as a user types them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fold3d import schedule
from fold3d.cli.main import main


@pytest.fixture(autouse=True)
def _terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def run(capsys, line: str) -> tuple[int, str, str]:
    code = main(shlex.split(line))
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_draw_text(capsys):
    code, out, err = run(capsys, "draw aiao -p 2 -m 2 -s 2")
    assert code == 0 and not err
    assert "stage 0 0F0 0F1 2F0 2F1 .   .   .   2B0 === 2B1 === 0B0 === 0B1 ===\n" in out
    assert out.splitlines()[-1].startswith("pp=2 segments=2 m=2: 15 units")


def test_draw_png(capsys, tmp_path):
    code, out, _ = run(capsys, "draw fold -p 2 -m 4 -s 2 -n 2 --turn all --comm --png out.png")
    assert code == 0 and out == "out.png\n"
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.parametrize("suffix, begin", [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_the_suffix_says_the_format(capsys, tmp_path, suffix: str, begin: bytes):
    assert run(capsys, f"draw 1f1b -p 2 -m 2 --picture out.{suffix}")[0] == 0
    assert (tmp_path / f"out.{suffix}").read_bytes().startswith(begin)


@pytest.mark.parametrize(
    "line, message",
    [
        ("drow 1f1b -p 2", "'drow' is none of draw, .*did you mean 'draw'"),
        (
            "draw 1f1b --micro-batchs 2",
            r"unrecognized arguments: --micro-batchs .*\(did you mean '--micro-batches'\?\)",
        ),
        ("simulate 1f1b --dp-sync zeroo1", "argument --dp-sync: 'zeroo1' is none of .*did you mean 'zero1'"),
        ("draw 1f1b -p 2 -m 2 --picture out.jpg", r"'out.jpg' must end in .png, .svg or .pdf"),
    ],
)
def test_what_is_misspelt_is_suggested(capsys, line: str, message: str):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_draw_with_communication(capsys):
    code, out, _ = run(capsys, "draw 1f1b -p 2 -m 1 --comm")
    assert code == 0
    assert out.startswith("step   rank 0       rank 1\n0      0F0          1RECV_F0\n1      0SEND_F0     1F0\n")
    assert "0REDUCE_GRAD" in out


def test_draw_and_validate_a_file(capsys, tmp_path):
    made = schedule.generate("interleaved", pp=2, segments=2, micro_batches=3)
    schedule.save_csv(made, tmp_path / "mine.csv")
    schedule.save_csv(schedule.lower(made, reduce=True), tmp_path / "all.csv")
    assert run(capsys, "draw mine.csv")[0] == 0
    assert run(capsys, "draw all.csv")[0] == 0
    assert run(capsys, "validate mine.csv")[1].startswith("mine.csv: valid, compute only\npp=2 segments=2 m=3:")
    assert run(capsys, "validate all.csv")[1].startswith("all.csv: valid, with communication\n")


def test_validate_shows_the_bad_cell(capsys, tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    code, out, err = run(capsys, "validate bad.csv")
    assert code == 1 and not out
    assert "1B0 on rank 1 comes before 1F0 (step 1), which it waits for" in err
    assert ">1B0<" in err
    assert run(capsys, "draw bad.csv")[0] == 1


@pytest.mark.parametrize(
    "line, message",
    [
        ("draw zigzag -p 2 -m 2", "unknown schedule 'zigzag': set schedule to one of gpipe, 1f1b"),
        ("draw gpipe -p 2 -m -1", "--micro-batches is -1; it must be at least 1"),
        ("draw gpipe -p 2", "--micro-batches is missing, as in: fold3d draw gpipe -p 4 -m 8"),
        ("draw gpipe -p 2 -m 4 -s 2", "segments=2 has no effect on schedule 'gpipe'"),
        ("draw aiao -p 2 -m 99999999999", "more than 1e+07 forwards in one step; lower micro_batches"),
        ("draw fold -p 2 -m 4 -n 9", "--group-size=9 is more than --micro-batches=4"),
        ("draw aiao -p 2 -m 4 -n 2", "group_size=2 has no effect on schedule 'aiao'"),
        ("draw some.csv -p 2", "--pp=2 has no effect: the file says it"),
        ("validate none.csv", "cannot read the schedule 'none.csv'"),
    ],
)
def test_errors_teach(capsys, line: str, message: str):
    code, out, err = run(capsys, line)
    assert code == 1 and not out
    assert err.startswith("fold3d: ") and message in err


def test_schedules(capsys):
    code, out, _ = run(capsys, "schedules")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == schedule.names()
    (fold,) = [line for line in out.splitlines() if line.startswith("fold ")]
    assert fold.endswith("[segments, group_size, turn]")


def test_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "fold3d.cli.main", "draw", "nothing", "-p", "2", "-m", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1
    assert done.stderr.startswith("fold3d: unknown schedule") and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["--version", "--help", "draw --help"])
def test_what_needs_no_torch_does_not_load_it(words: str) -> None:
    code = (
        "import sys\n"
        "from fold3d.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
