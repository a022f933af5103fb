"""The shaped cluster with layers on the simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster.on_rank.host_time import exposed_host_ms
from benchmarks.cluster.scenarios import SCENARIOS
from benchmarks.cluster.systems import find_system, find_systems, on_device
from fold3d.observe.step_breakdown import RawRecord, make_breakdown

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = [sys.executable, "-m", "benchmarks.cluster"]


def test_systems_on_it_by_name() -> None:
    scenario = SCENARIOS["A"]
    names = on_device(["torch-bfs:2,8", "fold3d-auto"])
    assert names == ("fold3d-auto", "torch-bfs:2,8@sim", "fold3d-auto@sim")
    found = [(one.name, one.segments, one.device) for name in names for one in find_systems(name, scenario)]
    assert found[:3] == [("fold3d-auto", 1, "cpu"), ("torch-bfs:2@sim", 2, "sim"), ("torch-bfs:8@sim", 8, "sim")]
    for name, reason in {"fold3d-auto@gpu": "device", "load@sim": "computes nothing"}.items():
        with pytest.raises(ValueError, match=reason):
            find_system(name, scenario)


def test_one_run_on_the_simulated_device(tmp_path: Path) -> None:
    """The layers take their time on streams, and the thread that launches does not."""
    path = tmp_path / "sim.json"
    arguments = ["--scenario", "smoke", "--loopback", "--device", "sim", "--repetitions", "1", "--steps", "3"]
    arguments += ["--systems", "fold3d-auto", "torch-1f1b"]
    done = subprocess.run(
        [*CLUSTER, *arguments, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    systems = json.loads(path.read_text())["systems"]
    assert {"fold3d-auto", "fold3d-auto@sim", "torch-1f1b@sim"} <= set(systems)
    least = SCENARIOS["smoke"].compute_s
    for name, system in systems.items():
        (run,) = system["runs"]
        assert run["step_s"] >= 0.8 * least, name
    (run,) = systems["fold3d-auto@sim"]["runs"]
    assert 0 < run["asleep"] < 1
    for breakdown in run["breakdowns"]:
        assert breakdown["compute_ms"] >= 0.8 * 1e3 * least
        assert 0 <= breakdown["host_exposed_ms"] <= breakdown["step_ms"]


def test_device_time_that_only_the_host_explains() -> None:
    """Of 100 ms it computes 40; it waits 30 for a message that has come after 10 of them, and 20 for another."""
    ms = 1_000_000
    records: list[RawRecord] = [
        ("compute", "0F0", 0, 20 * ms, 0),
        ("wait", "0RECV_B0", 20 * ms, 50 * ms, 0),
        ("recv_b", "0RECV_B0", 25 * ms, 30 * ms, 8),
        ("compute", "0B0", 50 * ms, 70 * ms, 0),
        ("wait", "0RECV_B1", 70 * ms, 90 * ms, 0),
        ("recv_b", "0RECV_B1", 85 * ms, 90 * ms, 8),
    ]
    assert exposed_host_ms(make_breakdown(records, 0, 100 * ms)) == pytest.approx(10 + 20)
