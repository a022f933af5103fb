"""`make demo-network`: three systems, their timelines, and a last line worth reading; nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.cluster import demo
from benchmarks.cluster.on_rank.torch_timeline import TorchTimeline
from benchmarks.cluster.on_rank.virtual_layer import VirtualLayer
from benchmarks.cluster.results.latency import Latency
from benchmarks.cluster.results.report import Report, Run
from benchmarks.cluster.scenarios import SCENARIOS
from benchmarks.tests.test_cluster import ROOT, namespace_of, namespaces, needs_namespaces, wait_for_workers
from fold3d.observe.step_breakdown import make_breakdown

MS = 1_000_000
DEMO = [sys.executable, "-m", "benchmarks.cluster.demo"]


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "why_unavailable", lambda: "limited links need root (this is uid 1000)")
    assert demo.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "need root (this is uid 1000): run it as root on Linux, for example: sudo make demo-network" in said.err
    assert not said.out and not (tmp_path / "out").exists()


def test_all_of_it_on_loopback(tmp_path: Path) -> None:
    options = ["--scenario", "smoke", "--thin", "1", "--steps", "2", "--loopback", "--out", str(tmp_path)]
    done = subprocess.run([*DEMO, *options], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fold3d, as it plans itself" in done.stdout and done.stdout.count("█") > 20
    *_, first, last = done.stdout.splitlines()
    assert first.startswith("On UNSHAPED links") and first.count("times that with") == 2
    assert last.startswith("The sum of the gradients needs") and "hidden), the others" in last
    assert "step 15 of 15" in done.stderr and "s a step: fold3d, as it plans itself" in done.stderr
    for name in ("chart", "steps", "timeline-fold3d-auto", "timeline-torch-bfs-2", "timeline-fold3d-interleaved-npp-2"):
        assert f"{tmp_path}/{name}.png" in done.stdout
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    for path in tmp_path.glob("*.json"):
        trace = json.loads(path.read_text())
        assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}
        passes = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "forward"]
        assert len(passes) >= 4 * 2, path


@needs_namespaces
def test_after_ctrl_c_nothing_is_left(tmp_path: Path) -> None:
    before = namespaces()
    command = [*DEMO, "--scenario", "smoke", "--thin", "1", "--steps", "100000", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    before_it = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    run = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before_it)
    try:
        workers = wait_for_workers(run.pid)
        own = {namespace_of(worker) for worker in workers} - before
        assert len(own) == 4
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=20)
        assert run.returncode == 130
        assert "interrupted: the hosts and everything on them are gone" in said and "Traceback" not in said
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive and not own & namespaces()
        assert not list(tmp_path.iterdir())
    finally:
        run.kill()
        run.wait()


def test_the_result_in_words() -> None:
    def run(step_s: float, wait_ms: int) -> Run:
        records = (("compute", "0F0", 0, 10 * MS, 0), ("wait", "0REDUCE_GRAD", 10 * MS, (10 + wait_ms) * MS, 0))
        nothing = Latency(alone_ms=None, beside_dp_ms=None, dp_sync_ms=None)
        return Run(
            step_s=step_s, steps_s=(step_s,), stolen=0.0, sent_bytes=None, latency=nothing, timelines=(records, records)
        )

    report = Report(scenario=SCENARIOS["A"], network="", shaped=True)
    report.runs = {"fold3d-auto": [run(1.2, 100)], "torch-bfs:4": [run(1.8, 600)]}
    written = {name: [Path(f"out/{name}.png"), Path(f"out/{name}.json")] for name in report.runs}
    written[""] = [Path("out/chart.png"), Path("out/steps.png")]
    text = demo.describe(report, written)
    ours, theirs = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("fold3d", "torch"))
    assert theirs.count("█") == demo.BAR and ours.count("█") == round(demo.BAR * 1.2 / 1.8)
    assert theirs.endswith("1.50 x fold3d")
    assert "a step takes 1.20 s with fold3d, 1.50 times that with torch.distributed.pipelining" in text
    last = "in its last one fold3d waited 100 ms for it (90 % hidden), the others 600 ms."
    assert text.endswith(f"needs 1000 ms of the network in every step: {last}")


def test_a_step_of_torch_as_fold3d_records_it() -> None:
    layers = {0: [VirtualLayer(4, 0.001, 0.002), VirtualLayer(4, 0.001, 0.002)], 2: [VirtualLayer(4, 0.001, 0.002)]}
    timeline = TorchTimeline(layers)
    for _ in range(2):  # the second step counts
        timeline.begin()
        for _ in range(2):
            x = torch.zeros(2, requires_grad=True)
            outputs = []
            for chunk in layers.values():
                for layer in chunk:
                    x = layer(x)
                outputs.append(x)
            x.sum().backward()
        finished: Any = torch.futures.Future()
        work = SimpleNamespace(get_future=lambda future=finished: future)
        timeline.sum_begins(layers[2][0].weight, work)
        with timeline.waiting():
            finished.set_result(None)
    records = timeline.records()
    computed = [action for lane, action, *_ in records if lane == "compute"]
    assert computed == ["0F0", "2F0", "2B0", "0B0", "0F1", "2F1", "2B1", "0B1"]
    (sum_of_gradients,) = [record for record in records if record[0] == "reduce"]
    assert sum_of_gradients[1] == "2REDUCE_GRAD" and sum_of_gradients[4] == 16
    breakdown = make_breakdown(records, records[0][2], max(record[3] for record in records))
    lasted = sum(record[3] - record[2] for record in records if record[0] == "compute")
    assert breakdown.compute_ms == pytest.approx(lasted / 1e6) and breakdown.compute_ms > 2 * 3 * 3
