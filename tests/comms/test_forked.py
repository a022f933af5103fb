"""A forked child of a rank, such as a worker of the script itself, has the rank's objects, but not its threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, threading, time, types
import torch
from fold3d import _C
from fold3d.comms.groups import QUEUES

HOST, CPU, what = "127.0.0.1", torch.device("cpu"), sys.argv[1]
arbiter = _C.NicArbiter()

def in_turn(rank):
    if what == "Executor":
        peers[rank].connect((HOST, peers[1 - rank].port), (HOST, peers[1 - rank].port), 30.0)
        chunk = types.SimpleNamespace(forward=None, reduce=None)
        offload = _C.OffloadOptions(1 << 20)
        made[rank] = _C.Executor(
            [chunk], rank, 2, dict.fromkeys(QUEUES, ""), CPU, 30.0, "", peers[rank], arbiter, offload=offload
        )
    else:
        peers[rank].connect((HOST, peers[1 - rank].port), 30.0)
        if what == "BucketSync":
            made[rank] = _C.BucketSync(rank, 2, arbiter, CPU, 30.0, "", slice_bytes=0, peers=peers[rank])
        else:
            made[rank] = _C.TensorSync(f"group {rank}", rank, 2, arbiter, 30.0, "", peers=peers[rank])

made = [None, None]
if what == "Executor":
    peers = [_C.TcpPeers(rank, 2, HOST, "s" * 32) for rank in range(2)]
else:
    peers = [_C.RingPeers(rank, 2, HOST, "s" * 32, tensor_parallel=what == "TensorSync") for rank in range(2)]
other = threading.Thread(target=in_turn, args=(1,))
other.start()
in_turn(0)
other.join()

child = os.fork()
if child == 0:
    made[0].close()
    del made[0]  # the other goes with the interpreter
    sys.exit(7)
deadline = time.monotonic() + 60
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
    time.sleep(0.05)
if ended == (0, 0):
    os.kill(child, 9)
    os.waitpid(child, 0)
print("hangs" if ended == (0, 0) else os.waitstatus_to_exitcode(ended[1]), flush=True)
for one in made:
    one.close()
"""


@pytest.mark.parametrize("what", ["Executor", "BucketSync", "TensorSync"])
def test_a_child_ends_and_its_parents_objects_go_on(what: str) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, what], capture_output=True, text=True, timeout=300)
    assert (ran.stdout, ran.returncode) == ("7\n", 0), ran.stderr
