"""Rates: predictions are corrected by measurements, and a wrong order is found by trying."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fold3d.cluster.fields import Field
from fold3d.cluster.jobs import Option
from fold3d.cluster.rates import Measured, Measurement, estimate, options_of, probe, read_predictions
from fold3d.errors import ConfigError

GPUS = {"a": 2, "t": 1}
PREDICTED = (Option("a", 1, 100.0), Option("a", 2, 190.0), Option("t", 1, 20.0), Option("h", 1, 0.0))


def test_nothing_measured() -> None:
    found = estimate(PREDICTED, ())
    assert [found[option].rate for option in PREDICTED] == pytest.approx([100.0, 190.0, 20.0, 0.0])
    assert found[PREDICTED[0]].error == pytest.approx(math.sqrt(0.35**2 + 0.25**2 + 0.1**2))
    assert not any(one.measured for one in found.values())


def test_a_measurement_corrects_what_is_near_most() -> None:
    """Half as fast as predicted on one GPU of a: nearly so on two of them, less so on t, whose error shrinks least."""
    before, found = estimate(PREDICTED, ()), estimate(PREDICTED, [Measurement("a", 1, 50.0)])
    one, two, t = (found[option] for option in PREDICTED[:3])
    assert (one.rate, one.error, one.measured) == (50.0, 0.03, True)
    assert 95.0 < two.rate < 105.0 and 10.0 < t.rate < 15.0
    assert one.error < two.error < t.error < before[PREDICTED[2]].error


def test_what_was_measured_stands_however_wrong_the_prediction_was() -> None:
    found = estimate(PREDICTED, [Measurement("a", 1, 1.0), Measurement("t", 1, 4000.0)])
    assert found[PREDICTED[0]].rate == 1.0 and found[PREDICTED[2]].rate == 4000.0


def test_each_kind_is_tried_and_then_what_is_close() -> None:
    assert probe(estimate(PREDICTED, ()), GPUS) == PREDICTED[1], "the most promising first"
    seen = [Measurement("a", 2, 190.0)]
    assert probe(estimate(PREDICTED, seen), GPUS) == PREDICTED[2], "the kind that was not measured"
    seen.append(Measurement("t", 1, 20.0))
    assert probe(estimate(PREDICTED, seen), GPUS) is None, "one GPU is far from two: settled"
    fewer = {"a": 1, "t": 0}
    assert probe(estimate(PREDICTED, ()), fewer) == PREDICTED[0], "of what there is; the others would never be tried"
    assert probe(estimate(PREDICTED, [Measurement("a", 1, 100.0)]), fewer) is None
    near = (Option("a", 1, 100.0), Option("a", 2, 105.0))
    assert probe(estimate(near, [Measurement("a", 1, 100.0)]), GPUS) == near[1], "who is ahead is not settled"


def test_the_file_beside_the_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    assert Measured.read(path) == Measured()
    made = Measured(
        rates=(Measurement("a", 2, 5.0, 0.1, "dp1 tp1 pp2"),), save_seconds=3.3, start_seconds=19.0, done=7.0
    )
    made = made.with_rate(Measurement("a", 2, 6.0)).with_rate(Measurement("t", 1, 1.0))
    made.write(path)
    assert Measured.read(path) == made and len(made.rates) == 2
    assert json.loads(path.read_text())["left"] is None, "infinity is no JSON"
    assert [file.name for file in tmp_path.iterdir()] == ["rates.json"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cannot be read as measured rates"),
        ('{"version": 2}', "has version 2; this fold3d reads 1"),
        ('{"version": 1, "left": 0, "rates": [{"sort": 1}]}', r"rates\[0\] has 'sort'; known are kind, gpus, rate"),
    ],
)
def test_a_file_of_something_else(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Measured.read(path)


def test_predictions(tmp_path: Path) -> None:
    path = tmp_path / "predicted.json"
    path.write_text(
        '{"rates": [{"kind": "a100", "gpus": 2, "rate": 61000.0}, {"kind": "t4", "gpus": 1, "rate": 9000}]}'
    )
    assert read_predictions(path) == (Option("a100", 2, 61000.0), Option("t4", 1, 9000.0))
    assert options_of(Field({"a100:2": 61000, "t4": 9000}, "here")) == read_predictions(path)
    for bad in ("[]", "{}", '{"rates": []}', '{"rates": [{"kind": "t4"}]}', '{"rates": {"t4:x": 1}}'):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"predicted\.json"):
            read_predictions(path)
    with pytest.raises(ConfigError, match="cannot be read as predicted rates"):
        read_predictions(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="one for each kind and number"):
        options_of(Field({"t4": 1.0, "t4:1": 2.0}, "here"))


def test_measurements_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"a x1: measured 0\.0"):
        estimate(PREDICTED, [Measurement("a", 1, 0.0)])
    with pytest.raises(ConfigError, match=r"a x1: measured 1e\+20, predicted 100; they must be in the same unit"):
        estimate(PREDICTED, [Measurement("a", 1, 1e20)])
