"""Hosts: network namespaces joined by a bridge or a relay, or, unshaped, this machine's loopback interface.

The namespaces have no names. They live as long as this process holds their descriptors or a rank runs in them, and
ranks die with their parent (worker.py), so that even a killed run leaves nothing behind and two runs cannot collide.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from benchmarks.cluster.testbed.relay import start_relay, why_no_relay

CLONE_NEWNET = 0x40000000
PROGRAMS = ("ip", "tc", "nsenter")
SETUP_TIMEOUT = 30.0
MAX_HOSTS = 200
MAX_RTT_MS = 1000.0
WINDOWS_MBIT = 100.0
"""The rate for which the windows below are given; those of other links are in proportion, and so are their queues."""
PORT = 29500  # of the job's store; namespaces are empty, so it is free there


class Hosts(Protocol):
    """Where the ranks run; a context manager."""

    shaped: bool
    description: str

    def __enter__(self) -> Hosts: ...

    def __exit__(self, *error: Any) -> None: ...

    def command(self, rank: int, command: list[str]) -> list[str]:
        """Returns `command` so that it runs on the host of `rank`."""

    def environment(self) -> dict[str, str]:
        """Returns what every rank needs in its environment: interface and address of the job's store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A host's link to the switch, the same both ways."""

    rate_mbit: float
    """In Mbit/s."""
    latency_ms: float = 200.0
    """A packet that would wait longer in the queue is dropped; bounded windows keep the queue far shorter."""
    burst_s: float | None = None
    """What an idle link sends at once, in seconds at its rate. None: 4 ms or 32 kB, so that even the tick of a slow
    kernel is no limit."""
    rtt_ms: float = 0.0
    """Round trip between two hosts, on top of what queues and the machine take."""
    jitter_ms: float = 0.0
    """By how much it varies, up and down."""
    bounded_windows: bool = True
    """Hosts bound TCP's windows, so that no queue is longer than some milliseconds. False: the kernel's defaults."""

    def __post_init__(self) -> None:
        """Raises: ValueError for a round trip that cannot be."""
        if not 0 <= self.jitter_ms <= self.rtt_ms <= MAX_RTT_MS:
            raise ValueError(
                f"a round trip of {self.rtt_ms:g} ms that varies by {self.jitter_ms:g} ms cannot be: "
                f"0 <= jitter <= round trip <= {MAX_RTT_MS:g} ms"
            )

    @property
    def send_window(self) -> str:
        """net.ipv4.tcp_wmem: least, first and greatest bytes in flight of a connection; worth 5 ms at most, and two
        round trips, as the kernel counts its own bytes about a packet, too."""
        return self._window(16384, 65536, round_trips=2)

    @property
    def receive_window(self) -> str:
        """net.ipv4.tcp_rmem, of which the window is about a half; worth 10 ms at most, and four round trips."""
        return self._window(65536, 131072, round_trips=4)

    def _window(self, first: int, greatest: int, *, round_trips: int) -> str:
        share = self.rate_mbit / WINDOWS_MBIT
        more = round_trips * (self.rtt_ms + self.jitter_ms) * self.rate_mbit * 1e3 / 8
        return f"4096 {round(first * share)} {round(greatest * share + more)}"

    def shape(self, device: str) -> str:
        """Returns the command that limits what leaves `device`."""
        bytes_per_second = self.rate_mbit * 1e6 / 8
        burst = (
            max(int(bytes_per_second / 250), 32_000) if self.burst_s is None else int(bytes_per_second * self.burst_s)
        )
        rate = f"{self.rate_mbit * 1e6:.0f}bit"
        return f"tc qdisc add dev {device} root tbf rate {rate} burst {burst} latency {self.latency_ms:g}ms"


class LoopbackHosts:
    """All ranks on this machine's loopback interface: no limit, no root. Its times say nothing about networks."""

    shaped = False
    description = "UNSHAPED: loopback interface, no bandwidth limit; no statement about any network"

    def __enter__(self) -> LoopbackHosts:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def command(self, rank: int, command: list[str]) -> list[str]:
        """Returns the command itself."""
        return command

    def environment(self) -> dict[str, str]:
        """Returns loopback names."""
        return environment("lo", "127.0.0.1", self._port)


class NamespaceHosts:
    """`count` hosts, each with one link of `link` to a common switch that is itself no limit. Needs root.

    Args:
        ranks_per_host: neighbours that share a host and its link; what they say to each other does not travel.
    Raises: PermissionError without root, FileNotFoundError without iproute2, nsenter or, for a round trip, a compiler,
        RuntimeError when the kernel refuses a step.
    """

    shaped = True

    def __init__(self, count: int, link: Link, ranks_per_host: int = 1):
        if not 1 <= count <= MAX_HOSTS:
            raise ValueError(f"{count} hosts: must be 1 to {MAX_HOSTS}, all are on one /24 network")
        reason = why_unavailable()
        if reason:
            raise PermissionError(f"{reason}; run as root on Linux, or unshaped with --loopback")
        if link.rtt_ms and (reason := why_no_relay()):
            raise FileNotFoundError(reason)
        self.count = count
        self.link = link
        self.ranks_per_host = ranks_per_host
        trip = f", round trip {link.rtt_ms:g} ms" if link.rtt_ms else ""
        trip += f" +- {link.jitter_ms:g} ms" if link.jitter_ms else ""
        windows = ", TCP windows bounded" if link.bounded_windows else ""
        self.description = (
            f"{count} network namespaces{f' of {ranks_per_host} ranks' if ranks_per_host > 1 else ''}, "
            f"links of {link.rate_mbit:g} Mbit/s each way{trip}{windows}"
        )
        self._stack = ExitStack()
        self._hosts: list[str] = []

    def __enter__(self) -> NamespaceHosts:
        try:
            switch = self._namespace()
            self._hosts = [self._namespace() for _ in range(self.count)]
            _inside(switch, "ip link add switch type bridge && ip link set switch up")
            for number, host in enumerate(self._hosts):
                self._connect(switch, number, host)
            if self.link.rtt_ms:
                ports = [f"port{number}" for number in range(self.count)]
                start_relay(switch, ports, rtt_ms=self.link.rtt_ms, jitter_ms=self.link.jitter_ms, stack=self._stack)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _namespace(self) -> str:
        """Makes a network namespace; returns the path under which programs find it while this process lives."""
        descriptor = _new_namespace()
        self._stack.callback(os.close, descriptor)
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def _connect(self, switch: str, number: int, host: str) -> None:
        port = f"port{number}"
        joined = "" if self.link.rtt_ms else " master switch"  # else the relay is the switch
        _inside(
            switch,
            f"ip link add {port} type veth peer name eth0 netns {host} && ip link set {port}{joined} up && "
            + self.link.shape(port),
        )
        windows = (
            f"echo {self.link.send_window} > /proc/sys/net/ipv4/tcp_wmem && "
            f"echo {self.link.receive_window} > /proc/sys/net/ipv4/tcp_rmem && "
        )
        _inside(
            host,
            (windows if self.link.bounded_windows else "")
            + f"ip link set lo up && ip address add {address(number)}/24 dev eth0 && ip link set eth0 up && "
            + self.link.shape("eth0"),
        )

    def command(self, rank: int, command: list[str]) -> list[str]:
        """Returns `command` so that it runs on the host of `rank`; neighbours share one."""
        return ["nsenter", f"--net={self._hosts[rank // self.ranks_per_host]}", *command]

    def environment(self) -> dict[str, str]:
        """Returns the names inside the namespaces; host 0 has the store."""
        return environment("eth0", address(0), PORT)


def address(host: int) -> str:
    """Returns the IPv4 address of a host. Namespaces are closed: the same addresses elsewhere do not matter."""
    return f"10.77.0.{host + 1}"


def environment(interface: str, master: str, port: int) -> dict[str, str]:
    """Returns the variables that torch, gloo and fold3d read."""
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def why_unavailable() -> str:
    """Returns what this machine lacks for network namespaces; empty when nothing."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"limited links need {', '.join(missing)} (Debian packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return f"limited links need root (this is uid {os.geteuid()})"
    try:
        os.close(_new_namespace())
    except OSError as error:  # root of a container that may not
        return f"limited links need network namespaces: {error}"
    return ""


def _new_namespace() -> int:
    """Returns the descriptor of a new network namespace. A thread makes it, so that this process stays where it is."""
    made: list[int | OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            made.append(OSError(code, f"the kernel refuses one: {os.strerror(code)}"))
        else:
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _inside(namespace: str, script: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--net={namespace}", "sh", "-c", script], capture_output=True, text=True, timeout=SETUP_TIMEOUT
    )
    if done.returncode != 0:
        raise RuntimeError(f"setting up a host failed: {script}: {done.stderr.strip() or done.stdout.strip()}")
