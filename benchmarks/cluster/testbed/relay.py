"""start_relay(): a switch that has a round trip, ours (relay.cpp), as not every kernel has netem."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

COMPILER = os.environ.get("CXX", "c++")
COMPILE_S = 120.0
START_S = 10.0


def why_no_relay() -> str:
    """Returns what this machine lacks for a round trip; empty when nothing."""
    return "" if shutil.which(COMPILER) else f"a round trip needs a C++ compiler, and there is no {COMPILER!r}; set CXX"


def start_relay(namespace: str, ports: Sequence[str], *, rtt_ms: float, jitter_ms: float, stack: ExitStack) -> None:
    """Compiles the relay and starts it between `ports`, interfaces in `namespace`; `stack` ends it.

    Args:
        rtt_ms: from any port to any other and back, on top of what queues and the machine take.
        jitter_ms: by how much that varies, up and down.
    Raises: RuntimeError when it cannot be compiled or does not start.
    """
    program = Path(stack.enter_context(TemporaryDirectory(prefix="fold3d-relay-"))) / "relay"
    source = Path(__file__).with_suffix(".cpp")
    compiled = subprocess.run(
        [COMPILER, "-O2", "-std=c++20", str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
    )
    if compiled.returncode:
        raise RuntimeError(f"{COMPILER} does not compile {source.name}: {compiled.stderr.strip()}")
    one_way = [str(round(1e3 * ms / 2)) for ms in (rtt_ms, jitter_ms)]
    relay = subprocess.Popen(
        ["nsenter", f"--net={namespace}", program, str(os.getpid()), *one_way, *ports],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert relay.stdout is not None
    stack.callback(relay.stdout.close)
    stack.callback(relay.wait)
    stack.callback(relay.kill)
    readable, _, _ = select.select([relay.stdout], [], [], START_S)
    said = relay.stdout.readline().strip() if readable else "nothing"
    if said != "ready":
        raise RuntimeError(f"the relay did not start: it said {said}")
