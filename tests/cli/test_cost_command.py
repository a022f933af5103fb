"""`fold3d cost`, as a user types it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fold3d.cli.main import main
from fold3d.cluster.rates import Measured, Measurement
from tests.cli.test_trace_command import gpt2_folder  # noqa: F401  a fixture

PRICES = """device,gpus,price,spot,tflops,memory_gb,within_gbit,network_gbit
a100-80,2,4.0,1.6,,,,50
l4,1,0.5,,,,,25
small,2,0.1,,10,0.0001,100,25
"""


@pytest.fixture
def words(tmp_path: Path, gpt2_folder: Path) -> list[str]:  # noqa: F811
    (tmp_path / "prices.csv").write_text(PRICES)
    wanted = {"--tokens": "1e12", "--devices": "a100-80:2,l4:2", "--prices": tmp_path / "prices.csv"}
    plan = {"--global-samples": "8", "--sample-tokens": "16"}
    return ["cost", str(gpt2_folder), *(str(word) for pair in (wanted | plan).items() for word in pair)]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_all_numbers_as_json(capsys: pytest.CaptureFixture[str], words: list[str], tmp_path: Path) -> None:
    Measured(rates=(Measurement("l4", 2, 2e6),), save_seconds=20.0, start_seconds=52.0).write(tmp_path / "rates.json")
    words += ["--rates", str(tmp_path / "rates.json"), "--devices", "a100-80:2,l4:2,small:2"]
    told = json.loads(run(capsys, *words, "--json", "--deadline", "400h"))
    assert told["terms"]["restart"] == pytest.approx(0.02) and told["terms"]["deadline"] == 400.0
    rows = {one["devices"]: one for one in told["offers"]}
    l4 = rows["l4 x2, 2 machines"]
    assert (l4["source"], l4["tokens_per_second"], l4["error"]) == ("measured", 2e6, 0.03)
    assert l4["hours"] == pytest.approx(1e12 / 2e6 / 3600 + 0.02)
    assert l4["on_demand"] == pytest.approx(l4["hours"]) and l4["spot"] == {}
    a100 = rows["a100-80 x2"]
    assert a100["source"] == "predicted" and 0.03 < a100["error"] < math.sqrt(0.35**2 + 0.25**2 + 0.1**2)
    assert a100["plan"].startswith("dp=") and a100["flags"].startswith("--dp ") and a100["memory_bytes"] > 0
    (refused,) = told["refused"]
    assert refused["devices"] == "small x2" and "does not fit into memory" in refused["reason"]


@pytest.mark.full
def test_the_table(capsys: pytest.CaptureFixture[str], words: list[str], tmp_path: Path) -> None:
    Measured(rates=(Measurement("l4", 2, 2e6),)).write(tmp_path / "rates.json")
    words += ["--rates", str(tmp_path / "rates.json"), "--devices", "a100-80:2,l4:2,small:2"]
    table = run(capsys, *words, "--deadline", "400h").splitlines()
    assert table[0].startswith("GPT2LMHeadModel") and table[0].endswith("8 samples of 16 tokens a step")
    assert table[1].split()[:3] == ["devices", "plan", "tokens/s"]
    assert any(" 2e+06 +- 3%   measured " in line for line in table), table
    assert table[-2].startswith("small x2: does not fit") and table[-1].startswith("cheapest by 400 h: ")
    assert run(capsys, *words, "--deadline", "1m").splitlines()[-1].startswith("nothing is sure to be done by ")


@pytest.mark.parametrize(
    "more, message",
    [
        (["--deadline", "soon"], "--deadline 'soon' is no time; write 48h, 90m or 3d"),
        (["--tokens", "-1"], "--tokens is -1; it must be a finite number above 0"),
        (["--efficiency", "1.5"], "--efficiency is 1.5; it must be a finite number"),
        (["--batch", "3"], "--global-samples 8 is not divisible by --batch 3"),
        (["--script", "a.py"], "--script has no effect with --format table; it is for sbatch and skypilot"),
        (["--rates", "nowhere.json"], "--rates nowhere.json is no file; name the rates.json of a run"),
        (["--spot-up", "0.01", "--spot-down", "0"], "--spot-up is 0.01 hours, and a start takes 0.1 hours: hardly any"),
        (["--sample-tokens", "99"], "--sample-tokens is 99; the model takes 32 at most"),
        pytest.param(
            ["--devices", "small:2"],
            "the model runs on none of --devices:\n  small x2: does not fit into memory",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], words: list[str], more: list[str], message: str) -> None:
    assert main([*words, *more]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_script(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    said = run(capsys, *words, "--format", "sbatch", "--script", "train.py --data x", "--output", "there")
    assert main([*words, "--format", "estimator", "--deadline", "1m"]) == 1
    assert "nothing is sure to be done by " in capsys.readouterr().err
    assert said.startswith("#!/bin/bash\n#SBATCH --job-name=train\n") and "train.py --data x --dp " in said
