"""The shaped cluster: scenarios, hosts whose links are limited, ranks that never stay behind, one run on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.cluster.hosts import Link, NamespaceHosts, address, why_unavailable
from benchmarks.cluster.latency import Latency, measure_latency
from benchmarks.cluster.ranks import RanksFailed, run_ranks
from benchmarks.cluster.report import Report, Run
from benchmarks.cluster.scenarios import SCENARIOS
from benchmarks.cluster.systems import DEFAULT, find_system
from benchmarks.cluster.virtual_layer import VirtualLayer

ROOT = Path(__file__).resolve().parents[2]
NO_MESSAGES = Latency(alone_ms=None, beside_dp_ms=None)
CLUSTER = [sys.executable, "-m", "benchmarks.cluster"]
needs_namespaces = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")


def test_scenarios_have_the_ratios_they_are_for() -> None:
    a, b, c = (SCENARIOS[name] for name in "ABC")
    assert a.limit_s == pytest.approx(1.126, abs=1e-3) and a.limit_s == a.compute_s + a.bubble_s
    assert a.backward_s / a.forward_s == pytest.approx(2.44, abs=0.01)
    assert a.dp_sync_s / a.compute_s == pytest.approx(0.92, abs=0.005)
    assert b.dp_sync_s / b.compute_s == pytest.approx(0.47, abs=0.005)
    assert c.compute_s == pytest.approx(4 * b.compute_s) and c.gradient_bytes == b.gradient_bytes
    for one in SCENARIOS.values():
        assert one.communication_s < one.compute_s


def test_systems_by_name() -> None:
    scenario = SCENARIOS["A"]
    assert [find_system(name, scenario).segments for name in ("torch-bfs", "torch-bfs:8", "torch-1f1b")] == [4, 8, 1]
    assert len({find_system(name, scenario).name for name in DEFAULT}) == len(DEFAULT)
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


def test_latency_is_from_computed_to_received() -> None:
    scenario = SCENARIOS["smoke"]
    sender = [("compute", "0F0", 0, 1_000_000), ("compute", "0F1", 1_000_000, 2_000_000)]
    receiver = [("recv_f", "1RECV_F0", 0, 4_000_000), ("recv_f", "1RECV_F1", 4_000_000, 7_000_000)]
    assert measure_latency(scenario, [sender, receiver, [], []]) == Latency(alone_ms=4.0, beside_dp_ms=None)
    receiver.append(("reduce", "3REDUCE_GRAD", 4_500_000, 9_000_000))
    assert measure_latency(scenario, [sender, receiver, [], []]) == Latency(alone_ms=3.0, beside_dp_ms=5.0)
    assert measure_latency(scenario, [[], [], [], []]) == NO_MESSAGES
    assert measure_latency(scenario, [sender, [], [], receiver]) == NO_MESSAGES  # another replica's


def test_report_takes_medians() -> None:
    report = Report(scenario=SCENARIOS["A"], network="none", shaped=False)
    for name, times in {"fold3d-aiao:4": (1.0, 3.0, 2.0), "torch-bfs:4": (4.0,), "torch-bfs:8": (5.0,)}.items():
        report.runs[name] = [Run(step_s=one, steps_s=(), sent_bytes=None, latency=NO_MESSAGES) for one in times]
    assert report.ratio("fold3d-aiao:4") == pytest.approx(2.0 / SCENARIOS["A"].limit_s)
    assert "best torch schedule (torch-bfs:4) / best of fold3d (fold3d-aiao:4): 2.000" in report.table()


def test_a_failed_rank_ends_the_others(tmp_path: Path) -> None:
    commands = [["sleep", "60"], ["sh", "-c", "echo the reason >&2; exit 3"]]
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 ended with 3:\nthe reason"):
        run_ranks(commands, dict(os.environ), tmp_path, timeout=50)
    with pytest.raises(RanksFailed, match="not done after"):
        run_ranks(commands[:1], dict(os.environ), tmp_path, timeout=0.2)
    assert time.monotonic() - start < 30
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]


def test_one_run_on_loopback(tmp_path: Path) -> None:
    """fold3d and a torch schedule train the smallest scenario; everything it writes is labelled unshaped."""
    options = ["--loopback", "--scenario", "smoke", "--repetitions", "1", "--steps", "1", "--warm-up", "1"]
    options += ["--systems", "fold3d-aiao", "torch-bfs", "--json", str(tmp_path / "j"), "--png", str(tmp_path / "p")]
    options[-1] += ".png"
    done = subprocess.run([*CLUSTER, *options], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "j").read_text())
    assert not result["shaped"] and "UNSHAPED" in result["network"] and "UNSHAPED" in done.stdout
    assert set(result["systems"]) == {"fold3d-aiao:2", "torch-bfs:2"}
    assert all(system["ratio_to_limit"] > 0.99 for system in result["systems"].values())
    assert (tmp_path / "p.png").stat().st_size > 1000


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
        return "benchmarks.cluster.worker" in process.cmdline() and process.name().startswith("python")
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
