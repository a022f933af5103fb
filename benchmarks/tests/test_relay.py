"""Round trips of the testbed, hosts of several ranks, a host that is slower."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.cluster.run import main
from benchmarks.cluster.scenarios import SCENARIOS
from benchmarks.cluster.testbed.hosts import Link, NamespaceHosts, address, why_unavailable

ROOT = Path(__file__).resolve().parents[2]
needs_namespaces = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")

ANSWER = """
import hashlib, socket
with socket.create_server(("{0}", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
connection.settimeout(60)
got = hashlib.sha256()
for _ in range(20): connection.sendall(connection.recv(1))
while piece := connection.recv(65536): got.update(piece)
connection.sendall(got.digest())
"""
ASK = """
import hashlib, random, socket, time
connection = socket.create_connection(("{0}", 5000), timeout=60)
least = 1e9
for _ in range(20):
    start = time.perf_counter()
    connection.sendall(b"?"); connection.recv(1)
    least = min(least, time.perf_counter() - start)
data = random.Random(0).randbytes(1_000_000)
connection.sendall(data); connection.shutdown(socket.SHUT_WR)
print(least, connection.recv(32, socket.MSG_WAITALL) == hashlib.sha256(data).digest())
"""


@needs_namespaces
@pytest.mark.parametrize("jitter_ms", [0.0, 8.0])
def test_the_relay_delays_and_loses_nothing(jitter_ms: float) -> None:
    of_others = set(psutil.Process().children())
    with NamespaceHosts(3, Link(rate_mbit=1000, rtt_ms=20, jitter_ms=jitter_ms)) as hosts:
        (relay,) = set(psutil.Process().children()) - of_others
        commands = [
            hosts.command(rank, [sys.executable, "-c", code.format(address(2))])
            for rank, code in ((2, ANSWER), (0, ASK))
        ]
        with subprocess.Popen(commands[0], stdout=subprocess.PIPE, text=True) as answering:
            try:
                assert answering.stdout is not None and answering.stdout.readline() == "listening\n"
                asked = subprocess.run(commands[1], capture_output=True, text=True, timeout=120)
            finally:
                answering.kill()
        least, same = asked.stdout.split()
        assert float(least) >= (20 - jitter_ms) * 1e-3 and same == "True"
    assert not relay.is_running()


def test_windows_hold_what_a_round_trip_has_in_flight() -> None:
    near, far = Link(rate_mbit=100), Link(rate_mbit=100, rtt_ms=10)
    in_flight = 100e6 / 8 * 10e-3
    for window, halves in (("send_window", 2), ("receive_window", 4)):
        greatest = [int(getattr(link, window).split()[2]) for link in (near, far)]
        assert greatest[1] - greatest[0] == halves * in_flight
    with pytest.raises(ValueError, match="cannot be"):
        Link(rate_mbit=100, rtt_ms=1, jitter_ms=2)


def test_hosts_of_several_ranks_and_a_slow_one() -> None:
    one = SCENARIOS["B"].on_hosts(ranks_per_host=2, slow_host=1.5)
    assert [one.pace(rank) for rank in range(8)] == [1.0] * 6 + [1.5] * 2
    assert one.limit_s == SCENARIOS["B"].limit_s and "2 ranks a host" in one.name
    with pytest.raises(ValueError, match="do not fill"):
        one.on_hosts(ranks_per_host=3, slow_host=1)
    with pytest.raises(ValueError, match="at least 1"):
        one.on_hosts(ranks_per_host=1, slow_host=0.5)


@pytest.mark.parametrize(
    "options, reason",
    [(["--rtt", "1", "--jitter", "2"], "cannot be"), (["--ranks-per-host", "3"], "do not fill"),
     (["--slow-host", "0.5"], "at least 1")],
)  # fmt: skip
def test_hosts_that_cannot_be_are_refused_before_any_work(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--scenario", "smoke", *options]) == 2
    said = capsys.readouterr()
    assert reason in said.out + said.err


@needs_namespaces
@pytest.mark.dist
def test_a_run_with_round_trips(tmp_path: Path) -> None:
    options = ["--scenario", "smoke", "--repetitions", "1", "--steps", "1", "--systems", "torch-bfs", "--json"]
    options += [str(tmp_path / "j"), "--rtt", "4", "--jitter", "1", "--ranks-per-host", "2", "--slow-host", "2"]
    command = [sys.executable, "-m", "benchmarks.cluster", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "j").read_text())
    assert "2 network namespaces of 2 ranks" in result["network"] and "4 ms +- 1 ms" in result["network"]
    assert result["scenario"]["slow_host"] == 2 and result["shaped"]
