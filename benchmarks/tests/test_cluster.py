"""The shaped cluster: scenarios, hosts whose links are limited, ranks that never stay behind, one run on loopback."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.cluster.comparison import Effort, compare
from benchmarks.cluster.grid import GridReport, Measured, cells, costs_of, measure_grid
from benchmarks.cluster.on_rank.virtual_layer import VirtualLayer
from benchmarks.cluster.prediction import Costs, predict_step
from benchmarks.cluster.preemption import PreemptionReport, measure_preemption, variants
from benchmarks.cluster.results import rivals
from benchmarks.cluster.results.chart import draw_grid
from benchmarks.cluster.results.latency import Latency, measure_latency
from benchmarks.cluster.results.markdown import to_markdown
from benchmarks.cluster.results.report import Report, Run
from benchmarks.cluster.run import _falls_back
from benchmarks.cluster.scenarios import SCENARIOS, Scenario
from benchmarks.cluster.session import Session, make_run
from benchmarks.cluster.systems import DEFAULT, FAMILIES, System, find_system, find_systems
from benchmarks.cluster.testbed.hosts import Link, NamespaceHosts, address, why_unavailable
from benchmarks.cluster.testbed.machine import stolen_now, wait_for_calm
from benchmarks.cluster.testbed.ranks import Ranks, RanksFailed
from benchmarks.cluster.testbed.wake_up import VARIABLE, measure_wake_up_s, wake_up_s

ROOT = Path(__file__).resolve().parents[2]
NO_MESSAGES = Latency(alone_ms=None, beside_dp_ms=None, dp_sync_ms=None)
CLUSTER = [sys.executable, "-m", "benchmarks.cluster"]
needs_namespaces = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")


def test_scenarios_have_the_ratios_they_are_for() -> None:
    a, b, c = (SCENARIOS[name] for name in "ABC")
    assert a.limit_s == pytest.approx(1.126, abs=1e-3) and a.limit_s == a.compute_s + a.bubble_s
    assert a.backward_s / a.forward_s == pytest.approx(2.44, abs=0.01)
    assert a.dp_sync_s / a.compute_s == pytest.approx(0.92, abs=0.005)
    assert b.dp_sync_s / b.compute_s == pytest.approx(0.47, abs=0.005)
    assert b.compute_s == pytest.approx(1.152 + 2.826)  # what Table II gives for Megatron
    assert c.compute_s == pytest.approx(4 * b.compute_s) and c.gradient_bytes == b.gradient_bytes
    for one in SCENARIOS.values():
        assert one.communication_s < one.compute_s


def test_systems_by_name() -> None:
    scenario = SCENARIOS["A"]
    assert [find_system(name, scenario).segments for name in ("torch-bfs", "torch-bfs:8", "torch-1f1b")] == [4, 8, 1]
    assert {one.name.partition(":")[0] for name in DEFAULT for one in find_systems(name, scenario)} <= set(FAMILIES)
    assert [one.segments for one in find_systems("torch-bfs:2,8", scenario)] == [2, 8]
    assert find_system("fold3d-interleaved-nm", scenario).group_size(scenario) == scenario.micro_batches
    for name, reason in {
        "gpipe": "unknown",
        "torch-1f1b:4": "no effect",
        "torch-bfs:x": "integer",
        "torch-bfs:3": "divide",
    }.items():
        with pytest.raises(ValueError, match=reason):
            find_system(name, scenario)


def test_virtual_layer_takes_its_time_and_has_true_gradients() -> None:
    layer = VirtualLayer(parameters=8, forward_s=0.03, backward_s=0.05)
    x = torch.randn(2, 4, requires_grad=True)
    start = time.perf_counter()
    y = layer(x)
    middle = time.perf_counter()
    (y * y).sum().backward()
    assert middle - start >= 0.03 and time.perf_counter() - middle >= 0.05
    exact = x.detach().requires_grad_()
    weight = torch.zeros(8, requires_grad=True)
    ((exact + weight.mean()) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad)
    torch.testing.assert_close(layer.weight.grad, weight.grad)


def test_a_virtual_backward_ends_when_its_gradient_is_added() -> None:
    layer = VirtualLayer(parameters=8, forward_s=0.0, backward_s=0.05)
    seen: list[tuple[float, float]] = []
    layer.weight.register_post_accumulate_grad_hook(  # whoever communicates when a gradient is there
        lambda weight: seen.append((time.perf_counter(), float(weight.grad.sum())))
    )
    start = time.perf_counter()
    layer(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 1 and seen[0][0] - start >= 0.05 and seen[0][1] == pytest.approx(4.0)
    copied = copy.deepcopy(layer)
    start = time.perf_counter()
    copied(torch.ones(1, 4)).sum().backward()
    assert time.perf_counter() - start >= 0.05 and copied.busy is None and len(seen) == 1
    for inputs in (layer.weight, torch.ones(1, 4, requires_grad=True)):  # nothing is added, but the time is taken
        output = layer(inputs if inputs.dim() == 2 else torch.ones(1, 4)).sum()
        start = time.perf_counter()
        torch.autograd.grad(output, inputs)
        assert time.perf_counter() - start >= 0.05 and len(seen) == 1


def test_wake_up_is_what_the_process_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.0 <= measure_wake_up_s() < 0.02
    monkeypatch.setenv(VARIABLE, "0.25")
    assert wake_up_s() == 0.25


def test_latency_is_from_computed_to_received() -> None:
    scenario = SCENARIOS["smoke"]
    sender = [("compute", "0F0", 0, 1_000_000), ("compute", "0F1", 1_000_000, 2_000_000)]
    receiver = [("recv_f", "1RECV_F0", 0, 4_000_000), ("recv_f", "1RECV_F1", 4_000_000, 7_000_000)]
    found = measure_latency(scenario, [[sender], [receiver], [[]], [[]]])
    assert (found.alone_ms, found.beside_dp_ms, found.messages) == (4.0, None, (2, 0))
    receiver += [("reduce", "3REDUCE_GRAD", 1_500_000, 6_000_000), ("gather", "1GATHER", 5_000_000, 9_000_000)]
    found = measure_latency(scenario, [[sender], [receiver], [[]], [[]]])
    assert (found.alone_ms, found.beside_dp_ms, found.dp_sync_ms) == (None, 5.0, 7.5)  # 0F0's is beside it for a part
    same_names_again = measure_latency(scenario, [[sender, sender], [[], receiver], [[], []], [[], []]])
    assert same_names_again.messages == (0, 1)
    assert measure_latency(scenario, [[], [], [], []]) == NO_MESSAGES
    another_replicas = measure_latency(scenario, [[sender], [[]], [[]], [receiver]])
    assert another_replicas.messages == (0, 0)


def test_a_step_ends_with_its_slowest_rank() -> None:
    def answer(*ends_ms: int) -> dict[str, Any]:
        passes = [("compute", "0F0", 0, 31_000_000), ("compute", "0B0", 0, 31_000_000)]
        ends = [end * 1_000_000 for end in ends_ms]
        return {
            "ends_ns": ends,
            "asleep": 0.0,
            "stolen": 0.03,
            "sent_bytes": None,
            "records": [passes] * (len(ends) - 1),
            "breakdown": {},
            "choice": {},
            "timeline": (),
        }

    run = make_run(SCENARIOS["smoke"], [answer(0, 110, 190, 300), answer(10, 90, 200, 400)])
    assert run.steps_s == pytest.approx((0.1, 0.09, 0.2)) and run.step_s == pytest.approx(0.1)
    assert run.action_s == pytest.approx(0.001)  # of 62 ms in two actions, the layers' part is 60
    assert run.stolen == 0.03


class Stolen(Session):
    """Its ranks answer at once; each run loses another share of the cores' time."""

    def __init__(self, *shares: float | None, shaped: bool = True) -> None:
        self._hosts: Any = SimpleNamespace(shaped=shaped)
        self._count = SCENARIOS["smoke"].ranks
        self._timeout = None
        self._started = ExitStack()
        self.shares = list(shares)
        self.waits = 0
        self._wait_for_calm = self._count_wait
        self._wanted = {}

    def _start(self) -> Any:
        return self

    def _count_wait(self) -> None:
        self.waits += 1

    def ask(self, request: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        share = self.shares.pop(0)
        if share is None:
            raise RanksFailed("broken")
        answer = {"ends_ns": [0, round(share * 10**9)], "stolen": share, "sent_bytes": None, "asleep": 0.0}
        return [answer | {"records": [], "breakdown": {}, "choice": {}, "timeline": ()}] * self._count


def test_a_run_from_which_much_was_stolen_is_run_again() -> None:
    """The calmer one counts, what the other one took is kept; of a failure after a run nobody needs to know."""
    for shares, counted, dropped, left in (
        ((0.02, 0.0), 0.02, (), 1),
        ((0.2, 0.01, 0.0), 0.01, (0.2,), 1),
        ((0.2, 0.3, 0.25, 0.0), 0.2, (0.3, 0.25), 1),
        ((0.2, None, 0.0), 0.2, (), 1),
        ((0.2, 0.1, None, 0.0), 0.1, (0.2,), 1),
    ):
        session = Stolen(*shares)
        run = session.run(SCENARIOS["smoke"], find_system("torch-1f1b", SCENARIOS["smoke"]), steps=1, warm_up=1)
        assert (run.stolen, len(session.shares)) == (counted, left)
        assert run.dropped_s == pytest.approx(dropped)
        assert run.step_s == pytest.approx(counted)
        assert session.waits == len(shares) - left, "each run waits for calm"
    with pytest.raises(RanksFailed):
        Stolen(None).run(SCENARIOS["smoke"], find_system("torch-1f1b", SCENARIOS["smoke"]), steps=1, warm_up=1)
    unshaped = Stolen(0.2, 0.0, shaped=False)
    unshaped.run(SCENARIOS["smoke"], find_system("torch-1f1b", SCENARIOS["smoke"]), steps=1, warm_up=1)
    assert unshaped.shares == [0.0], "no measurement, so once is enough"


def test_runs_wait_for_calm_but_not_for_ever() -> None:
    shares = [0.4, 0.04, 0.03, 0.5]
    assert wait_for_calm(lambda: shares.pop(0), pause_s=0.0)
    assert shares == [0.5]
    assert not wait_for_calm(lambda: 0.2, pause_s=0.0, most_s=0.01)
    assert 0.0 <= stolen_now() <= 1.0


def test_comparisons_side_by_side(tmp_path: Path) -> None:
    """Of a family the fastest counts; what gloo's emulation sends is taken off."""
    results = [
        report_of({"fold3d-auto": (2.0,), "torch-bfs:4": (4.0,), "torch-bfs:8": (3.0,)}).as_json(),
        report_of({"fold3d-auto": (1.0,), "torch-bfs:4": (4.0,), "torch-1f1b": (5.0,)}).as_json(),
    ]
    results[1]["network"] += ", round trip 10 ms"
    results[1]["rivals"] = {"torch-bfs:4": {"without_emulation_s": 2.5}}
    lines = rivals.table(results).splitlines()
    assert lines[0] == "| step, s (times the first) | A, RTT 0 ms | A, RTT 10 ms |"
    assert lines[2:] == [
        "| fold3d | 2.00 (1.00) | 1.00 (1.00) |",
        "| torch pipelining, breadth first | 3.00 (1.50) | 2.50 (2.50) |",
    ]
    pytest.importorskip("matplotlib")
    rivals.draw(results, tmp_path / "rivals.svg")
    assert (tmp_path / "rivals.svg").stat().st_size > 0


def test_report_takes_medians() -> None:
    report = report_of({"fold3d-auto": (1.0, 3.0, 2.0), "torch-bfs:4": (4.0,), "torch-bfs:8": (5.0,)})
    assert report.ratio("fold3d-auto") == pytest.approx(2.0 / SCENARIOS["A"].limit_s)
    assert "best torch schedule (torch-bfs:4) / fold3d-auto: 2.000" in report.table()
    assert report_of({"torch-1f1b": (1.0,)}).ratio_to_reference("torch-1f1b") is None
    page = to_markdown({"command": "this", **report.as_json()})
    assert "| torch-bfs:8 | 5.000 | 2.50 |" in page and "| fold3d-auto | 2.000 | 1.00 |" in page


def test_of_disturbed_runs_only_the_calmest_counts_and_only_where_none_is_calm() -> None:
    report = report_of({"fold3d-auto": (1.0, 3.0, 2.0), "torch-1f1b": (4.0, 6.0)})
    stolen = {"fold3d-auto": (0.0, 0.3, 0.03), "torch-1f1b": (0.2, 0.4)}
    for name, shares in stolen.items():
        report.runs[name] = [replace(run, stolen=share) for run, share in zip(report.runs[name], shares, strict=True)]
    assert (report.median_s("fold3d-auto"), report.median_s("torch-1f1b")) == (1.5, 4.0)
    assert [row.split()[-1] for row in report.table().splitlines()[5:7]] == ["2/3", "1/2"]
    assert report.as_json()["systems"]["fold3d-auto"]["counted"] == 2


def report_of(times: dict[str, tuple[float, ...]]) -> Report:
    report = Report(scenario=SCENARIOS["A"], network="none", shaped=False)
    for name, of_one in times.items():
        report.runs[name] = [
            Run(step_s=one, steps_s=(one,), stolen=0.0, sent_bytes=None, latency=NO_MESSAGES) for one in of_one
        ]
    return report


class Pretended(Session):
    """Answers at once; more segments are slower, and 1F1B breaks."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, scenario: Scenario, system: System, *, steps: int, warm_up: int) -> Run:
        self.asked.append(system.name)
        if system.name == "torch-1f1b":
            raise RanksFailed("broken")
        return Run(step_s=float(system.segments), steps_s=(), stolen=0.0, sent_bytes=None, latency=NO_MESSAGES)


def test_of_several_candidates_the_fastest_goes_on() -> None:
    report = report_of({})
    entries = [find_systems(name, report.scenario) for name in ("torch-bfs:8,4", "torch-1f1b")]
    session = Pretended()
    compare(report, entries, session, Effort(repetitions=2, steps=1, warm_up=1))
    assert session.asked == ["torch-bfs:8", "torch-bfs:4", "torch-1f1b", "torch-bfs:4", "torch-1f1b"]
    assert report.failures == {"torch-1f1b": ["broken", "broken"]} and "FAILED 2 time(s)" in report.table()


def test_preemption_is_compared_with_idle_and_with_off() -> None:
    scenario = SCENARIOS["D"]
    report = PreemptionReport(scenario=scenario, network="none", shaped=False)
    for name, alone, beside, dp_sync in (
        ("no DP.sync", 10.0, None, None),
        ("preemption on", 9.0, 12.0, 1050.0),
        ("preemption off", 9.0, 30.0, 1000.0),
    ):
        latency = Latency(alone_ms=alone, beside_dp_ms=beside, dp_sync_ms=dp_sync)
        report.runs[name] = [Run(step_s=1.0, steps_s=(), stolen=0.0, sent_bytes=None, latency=latency)]
    assert set(report.runs) == set(variants(scenario))
    assert report.ratio_to_idle("preemption on") == pytest.approx(1.2)
    assert report.ratio_of_dp_sync("preemption on") == pytest.approx(1.05)
    assert report.ratio_to_idle("preemption off") == pytest.approx(3.0)
    assert "| preemption on | 12.0 | 1.20 | 1050 | 1.05 |" in to_markdown({"command": "this", **report.as_json()})


def test_grid_holds_the_simulator_against_measurements(tmp_path: Path) -> None:
    """In a cluster whose steps take what the simulator says, the errors are what was put in."""
    settings = [cell for base in ("A", "B", "D") for cell in cells(base, SCENARIOS[base])]
    assert len({cell.name for cell in settings}) == len(settings) > 40
    latency = Latency(alone_ms=1.0, beside_dp_ms=None, dp_sync_ms=None)
    alone = replace(SCENARIOS["A"], gradient_bytes=0)
    costs = costs_of(alone, Run(step_s=1.3, steps_s=(), stolen=0.0, sent_bytes=None, latency=latency, action_s=1e-4))
    assert costs.action_s == 1e-4 and 0 < costs.latency_s < 1e-3 and 0 < costs.step_s < 0.3
    report = GridReport(networks={"A": "none"})
    for cell, error in zip(settings[:3], (0.0, 0.1, -0.02), strict=False):
        predicted = predict_step(cell.scenario, cell.system, costs)
        assert cell.scenario.compute_s < predicted < 4 * cell.scenario.limit_s
        report.results.append(
            Measured(
                cell=cell, predicted_s=predicted, measured_s=predicted / (1 + error), stolen=0.0, counted=1, runs=1
            )
        )
    assert report.errors() == pytest.approx([0.0, 0.02, 0.1])
    assert "3 cells: median error 2.0%, worst 10.0%" in report.table()
    assert "median error 2.0%, worst 10.0%" in to_markdown({"command": "this", **report.as_json()})
    draw_grid(report, tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 1000


class Bursts(Session):
    """Answers at once; from every other run much is stolen, and it is slow."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, scenario: Scenario, system: System, *, steps: int, warm_up: int) -> Run:
        self.calls += 1
        step_s, stolen = (9.0, 0.3) if self.calls % 2 else (1.0, 0.02)
        return Run(step_s=step_s, steps_s=(), stolen=stolen, sent_bytes=None, latency=NO_MESSAGES)


def test_calm_runs_count_in_the_grid_and_beside_dp_sync() -> None:
    session, effort = Bursts(), Effort(repetitions=2, steps=1, warm_up=1)
    grid = GridReport(networks={"smoke": "none"})
    measure_grid(grid, "smoke", SCENARIOS["smoke"], session, effort)
    assert grid.results and all((one.measured_s, one.stolen) == (1.0, 0.02) for one in grid.results)
    latencies = PreemptionReport(scenario=SCENARIOS["D"], network="none", shaped=False)
    measure_preemption(latencies, session, Effort(repetitions=4, steps=1, warm_up=1))
    assert [row.split()[-3:] for row in latencies.table().splitlines()[-3:]] == [["1.000", "2.0%", "2/4"]] * 3
    shown = [row for row in grid.table().splitlines() if row.startswith("smoke: pp ")]
    assert len(shown) == len(grid.results) and all(row.endswith(" 1/2") for row in shown)


def test_the_simulator_knows_every_system_of_the_grid() -> None:
    costs = Costs(latency_s=1e-4, action_s=1e-4)
    scenario = SCENARIOS["A"]
    names = ("fold3d-interleaved-serial", "fold3d-interleaved-npp", "fold3d-aiao-zero1", "fold3d-aiao-early")
    steps = [predict_step(scenario, find_system(name, scenario), costs) for name in names]
    assert (
        steps[0] > steps[1] > steps[2] == pytest.approx(steps[3], rel=0.02)
    )  # zero1; early, with none before the vote
    forward_order = predict_step(scenario, find_system(names[-1], scenario), costs, [list(range(16))] * 2)
    assert forward_order == pytest.approx(steps[-1], rel=0.01)


ECHO = """
import json, sys
for line in sys.stdin: print(json.dumps({"rank": %d, "got": json.loads(line)}), flush=True)
"""


def test_ranks_answer_and_a_failed_one_ends_the_others(tmp_path: Path) -> None:
    environment = dict(os.environ)
    with Ranks([[sys.executable, "-c", ECHO % rank] for rank in range(2)], environment, tmp_path) as ranks:
        for request in ({"n": 1}, {"long": "x" * 100_000}):
            assert ranks.ask(request, timeout=30) == [{"rank": rank, "got": request} for rank in range(2)]
    start = time.monotonic()
    commands = [["sleep", "60"], ["sh", "-c", "read line; echo the reason >&2; exit 3"]]
    with (
        Ranks(commands, environment, tmp_path) as ranks,
        pytest.raises(RanksFailed, match=r"rank 1 ended with 3:\nthe reason"),
    ):
        ranks.ask({}, timeout=50)
    with Ranks(commands[:1], environment, tmp_path) as ranks, pytest.raises(RanksFailed, match="no answer after"):
        ranks.ask({}, timeout=0.2)
    assert time.monotonic() - start < 30
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


@pytest.mark.dist
def test_one_run_on_loopback(tmp_path: Path) -> None:
    """fold3d and a torch schedule train the smallest scenario; everything it writes is labelled unshaped."""
    options = ["--loopback", "--scenario", "smoke", "--repetitions", "1", "--steps", "1"]
    options += ["--systems", "fold3d-aiao-early", "fold3d-interleaved-npp", "torch-bfs"]
    options += ["--json", str(tmp_path / "j"), "--png", str(tmp_path / "p.png")]
    done = subprocess.run([*CLUSTER, *options], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "j").read_text())
    assert not result["shaped"] and "UNSHAPED" in result["network"] and "UNSHAPED" in done.stdout
    assert set(result["systems"]) == {"fold3d-aiao-early:2", "fold3d-interleaved-npp:2", "torch-bfs:2"}
    assert all(system["ratio_to_limit"] > 0 for system in result["systems"].values())  # one step measures nothing
    assert result["systems"]["fold3d-aiao-early:2"]["runs"][0]["breakdowns"]
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.dist
def test_messages_beside_dp_sync_on_loopback(tmp_path: Path) -> None:
    """The load runs without a limit, too: all messages arrive, DP.sync takes its time, and the table says unshaped."""
    options = ["--loopback", "--latency", "smoke", "--repetitions", "1", "--steps", "2", "--json", str(tmp_path / "j")]
    done = subprocess.run([*CLUSTER, *options], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "j").read_text())
    assert not result["shaped"] and "UNSHAPED" in done.stdout and not result["failures"]
    found = result["preemption"]
    assert found["no DP.sync"]["message_ms"] > 0 and found["no DP.sync"]["dp_sync_ms"] is None
    assert found["preemption on"]["dp_sync_ms"] > 0 and found["preemption off"]["dp_sync_ms"] > 0


RECEIVE = """
import socket
connection, _ = socket.create_server(("{0}", 5000)).accept()
while connection.recv(65536): pass
"""
SEND = """
import socket, time
for _ in range(100):
    try: s = socket.create_connection(("{0}", 5000), timeout=20); break
    except OSError: time.sleep(0.1)
start = time.perf_counter(); s.sendall(bytes(1_000_000)); s.shutdown(socket.SHUT_WR); s.recv(1)
print(time.perf_counter() - start)
"""


@needs_namespaces
def test_links_are_limited() -> None:
    """1 MB between two hosts takes what 40 Mbit/s allow, while two pairs of hosts do not disturb each other."""
    with NamespaceHosts(4, Link(rate_mbit=40)) as hosts:
        inside = os.readlink(hosts._hosts[0])
        assert inside != os.readlink("/proc/self/ns/net")
        receivers, senders = [], []
        for to, source in ((0, 1), (2, 3)):
            code = RECEIVE.format(address(to))
            receivers.append(
                subprocess.Popen(hosts.command(to, [sys.executable, "-c", code]), stdout=subprocess.DEVNULL)
            )
            code = SEND.format(address(to))
            command = hosts.command(source, [sys.executable, "-c", code])
            senders.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        try:
            seconds = [float(sender.communicate(timeout=30)[0]) for sender in senders]
        finally:
            for process in receivers + senders:
                process.kill()
                process.wait()
    ideal = 1_000_000 * 8 / 40e6
    assert all(0.9 * ideal < one < 5 * ideal for one in seconds), seconds
    assert inside not in namespaces()


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    before = namespaces()
    command = [*CLUSTER, "--scenario", "smoke", "--systems", "torch-bfs", "--steps", "100000", "--timeout", "100"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        workers = wait_for_workers(run.pid)
        own = {namespace_of(worker) for worker in workers} - before
        assert len(own) == 4
        run.send_signal(how)
        run.wait(timeout=20)
        assert run.returncode == (143 if how == signal.SIGTERM else -9)
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert not alive
        assert not own & namespaces()
        assert how == signal.SIGKILL or not list(tmp_path.iterdir())  # nobody is left to remove the job's files
    finally:
        run.kill()
        run.wait()


def wait_for_workers(parent: int) -> list[psutil.Process]:
    """Returns the four ranks of a run once each is Python in its own namespace."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        workers = [one for one in psutil.Process(parent).children() if is_worker(one)]
        if len(workers) == 4:
            return workers
        time.sleep(0.1)
    raise AssertionError("the run has not started its ranks within 60 s")


def is_worker(process: psutil.Process) -> bool:
    """Returns whether it is a rank, and no longer the program that enters the namespace before it."""
    try:
        return "benchmarks.cluster.on_rank.worker" in process.cmdline() and process.name().startswith("python")
    except psutil.Error:  # one of the short commands that set up the hosts
        return False


def namespace_of(process: psutil.Process) -> str:
    """Returns the network namespace of a process, "" when it has ended."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/net")
    except OSError:
        return ""


def namespaces() -> set[str]:
    """Returns the network namespaces in which some process runs."""
    return {namespace_of(process) for process in psutil.process_iter()} - {""}


def test_without_root_a_run_is_unshaped_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert _falls_back()
    said = capsys.readouterr()
    assert "root" in said.out + said.err and "UNSHAPED" in said.out + said.err
