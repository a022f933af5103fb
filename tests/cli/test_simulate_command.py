"""`fold3d simulate`, as a user types it."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest

from fold3d import schedule
from fold3d.cli.main import main
from fold3d.config import parse_bytes
from fold3d.observe import timeline, timeline_picture


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
    assert rank0.split() == ["stage", "0", "240.00", "7.50", "0.00", "50.00", "0.00"]
    assert rank1.split()[2:] == rank0.split()[2:]


def test_memory_over_the_step_grows_with_the_micro_batches_only_where_nothing_leaves(capsys):
    """AIAO, 4 segments: 16 micro-batches of 50 MB in a chunk keep twice as much as 8, on the device or in the pool."""
    device, pool = {}, {}
    for way, count in ((way, count) for way in ("none", "activations") for count in (8, 16)):
        line = f"simulate aiao -p 2 -s 4 -m {count} --saved 200 --offload {way} --copy-bandwidth 400"
        code, out, err = run(capsys, line)
        assert code == 0 and not err
        for stage, text in enumerate(out.splitlines()[-2:]):
            found = re.fullmatch(r"stage (\d)  ([▁▂▃▄▅▆▇█]{60})  ([\d.]+ .B) \(.*?\)(?:; in the pool (.*))?", text)
            assert (
                found is not None and int(found[1]) == stage and "█" in found[2] and bool(found[4]) == (way != "none")
            )
            device[way, count, stage] = parse_bytes("device", found[3])
            pool[way, count, stage] = parse_bytes("pool", found[4])
    for stage in (0, 1):
        assert 1.45e9 < device["none", 16, stage] - device["none", 8, stage] < 1.75e9
        assert device["activations", 16, stage] == device["activations", 8, stage] < 0.35 * device["none", 8, stage]
        assert 1.45e9 < pool["activations", 16, stage] - pool["activations", 8, stage] < 1.75e9


def test_sums_of_shards_are_exposed_or_hidden(capsys):
    """4 layers and 2 micro-batches; each sum of 1 MB over two ranks takes 1 ms, forward and backward have 8 each."""
    line = "simulate 1f1b -p 1 -m 2 --dp 1 --forward 10 --backward 20 --layers 4 --activation 1"
    link = "--tp 2 --tp-bandwidth 8 --tp-latency 1e-6"
    found = {}
    for way in ("none", "sub", "auto"):
        code, out, err = run(capsys, f"{line} {link} --tp-overlap {way}")
        assert code == 0 and not err
        compute, exposed = out.splitlines()[-1].split()[2:4]
        assert compute == "60.00" and "exposed TP" in out
        found[way] = float(exposed)
    assert run(capsys, line)[1].splitlines()[-1].split()[2] == "60.00"
    assert found["none"] == pytest.approx(2 * (8 + 8), abs=0.02)
    assert 0 < found["sub"] == found["auto"] < 0.4 * found["none"]


def test_early_says_how_many_and_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "simulate aiao -p 2 -m 4 -s 2 --dp-sync early --gradients 400 --png out.png")
    assert code == 0 and "gathers begun before the last reduce-scatter: " in out and out.endswith("out.png\n")
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_json(capsys):
    line = "simulate aiao -p 2 -m 4 -s 2 --saved 20"
    told = json.loads(run(capsys, f"{line} --json")[1])
    assert (told["pp"], told["segments"], told["micro_batches"]) == (2, 2, 4) and len(told["peak_bytes"]) == 2
    shown = run(capsys, line)[1]
    assert f"step {told['step_ms']:.2f} ms" in shown and f"{told['stages'][1]['bubble_ms']:.2f}" in shown
    assert "records" not in told


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
        ("simulate aiao -p 2 -m 2 --saved inf", "--saved is inf; it must be a number up to 1e+09"),
        ("simulate aiao -p 2 -m 2 --activation nan", "--activation is nan; it must be a number"),
        (
            "simulate aiao -p 2 -m 8 -s 2 --saved 1 --offload activations --copy-bandwidth 1e-300",
            "enough to copy each stash, here 500000 bytes, within 1,000 s",
        ),
    ],
)
def test_errors(capsys, line, message):
    code, out, err = run(capsys, line)
    assert code == 1 and not out and message in err


def test_the_picture_says_what_the_text_says(capsys, tmp_path, monkeypatch):
    """Share by share, and gathers have a row of their own."""
    seen = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timeline_picture, "write_picture", lambda *args, **named: seen.update(named, records=args[1]))
    code, out, _ = run(capsys, "simulate fold -p 4 -m 8 -s 2 --png out.png")
    assert code == 0
    title = timeline.shares(seen["simulated"], None)
    step = float(re.search(r"step ([\d.]+) ms", out)[1])
    rank0 = [float(number) for number in re.search(r"stage 0 +(.*)", out)[1].split()]
    names = ("compute", "bubble", "exposed PP.sync", "exposed DP.sync", "hidden DP.sync")
    for name, ms in zip(names, rank0, strict=True):  # the ranks are alike
        assert f"{name} {100 * ms / step:.1f} %" in title
    lanes = {lane for rank in seen["records"] for lane, action, *_ in rank if action.endswith("GATHER")}
    assert lanes == {"gather", "wait"}


def test_the_step_in_a_picture_s_title_has_the_waits_for_tp_sync(capsys, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timeline_picture, "write_picture", lambda *args, **named: seen.update(named))
    code, out, _ = run(capsys, "simulate fold -p 2 -m 4 -s 2 --tp 2 --tp-overlap none --tp-bandwidth 1 --png out.png")
    assert code == 0 and seen["simulated"][0].exposed_tp_ms > 0
    title = timeline.shares(seen["simulated"], None)
    step = float(re.search(r"step ([\d.]+) ms", out)[1])
    assert abs(float(re.search(r"step ([\d.]+) ms", title)[1]) - step) <= 0.1
    shares = re.findall(r"(compute|bubble|exposed \S+) ([\d.]+) %", title)
    assert "exposed TP.sync" in dict(shares) and abs(sum(float(share) for _, share in shares) - 100) <= 0.5


def test_a_picture_without_matplotlib_is_refused_before_the_work(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, "simulate aiao -p 2 -m 4 -s 2 --png out.png")
    assert code == 1 and not out and "--picture needs matplotlib, which is not installed: pip install matplotlib" in err
