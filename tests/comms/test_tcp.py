"""TcpPeers and RingPeers by themselves: whom they let in, and what they say when they cannot connect."""

from __future__ import annotations

import struct
import threading
import time
import types
from typing import Any

import pytest
import torch

from fold3d import _C
from fold3d.comms.groups import QUEUES
from fold3d.schedule import forward_only, generate, lower

SECRET = "s" * 64
HOST = "127.0.0.1"
SEND_F = 4  # as core::Kind has it
FLOAT, BFLOAT16, QUINT8, NOTHING = 6, 15, 13, 200  # as c10::ScalarType has them, and not


def test_a_refused_connection_says_so_and_where() -> None:
    """Not that it timed out: the process that listened has ended."""
    gone = _C.TcpPeers(1, 2, HOST, SECRET)
    port = gone.port
    del gone
    peers = _C.TcpPeers(0, 2, HOST, SECRET)
    start = time.monotonic()
    with pytest.raises(_C.CommError, match=f"could not connect to stage 1 at {HOST}:{port}: Connection refused"):
        peers.connect((HOST, port), (HOST, port), 60.0)
    assert time.monotonic() - start < 50.0


def test_an_abort_ends_whoever_connects() -> None:
    silent = _C.RingPeers(1, 2, HOST, SECRET)
    peers = _C.RingPeers(0, 2, HOST, SECRET)
    threading.Timer(0.2, peers.abort, ("rank 7 failed",)).start()
    with pytest.raises(_C.CommError, match="rank 7 failed"):
        peers.connect((HOST, silent.port), 60.0)


def connect_both(first: Any, second: Any, timeout: float) -> list[str]:
    """Returns the errors of two stages that connect."""
    errors: list[str] = []

    def connect(peers: Any, other: Any) -> None:
        try:
            peers.connect((HOST, other.port), (HOST, other.port), timeout)
        except _C.CommError as error:
            errors.append(str(error))

    thread = threading.Thread(target=connect, args=(second, first))
    thread.start()
    connect(first, second)
    thread.join()
    return errors


@pytest.mark.parametrize(
    "secret, job, connects",
    [(SECRET, "replica 0", True), (SECRET, "replica 1", False), (SECRET[:-1] + "t", "replica 0", False)],
    ids=["the same", "another job", "a secret that differs in its last character"],
)
def test_who_gets_in(secret: str, job: str, connects: bool) -> None:
    first = _C.TcpPeers(0, 2, HOST, SECRET, "replica 0")
    second = _C.TcpPeers(1, 2, HOST, secret, job)
    errors = connect_both(first, second, 30.0 if connects else 0.5)
    assert len(errors) == (0 if connects else 2), errors


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(_C.CommError, match="needs at least 32"):
        _C.TcpPeers(0, 2, HOST, "short")


# What arrives


def frame(dtype: int, element_bytes: int, **changed: int) -> torch.Tensor:
    """The head of a message, see csrc/comm/p2p/frame.cpp: two elements and their bytes."""
    fields = {"kind": SEND_F, "inline": 1, "chunk": 0, "dimensions": 1} | changed
    payload = bytes(2 * element_bytes)
    tensor = struct.pack("=BBBB", dtype, element_bytes, 0, fields["dimensions"]) + struct.pack("=q", 2)
    used = 32 + len(tensor) + len(payload)
    prefix = struct.pack(
        "=IHBBHHiiIQ",
        0x46334431,
        4,
        fields["kind"],
        fields["inline"],
        1,
        used,
        fields["chunk"],
        0,
        1,
        changed.get("payload_bytes", len(payload)),
    )
    return torch.frombuffer(bytearray(prefix + tensor + payload), dtype=torch.uint8)


@pytest.mark.parametrize(
    "head, error",
    [
        (frame(FLOAT, 4), ""),
        (frame(BFLOAT16, 2), ""),
        (frame(FLOAT, 2), "an element of Float has 4 bytes, not 2"),
        (frame(BFLOAT16, 4), "an element of BFloat16 has 2 bytes, not 4"),
        (frame(QUINT8, 1), "unknown dtype 13"),
        (frame(NOTHING, 4), "unknown dtype 200"),
        (frame(FLOAT, 0), "its element size is 0"),
        (frame(FLOAT, 200), "its element size is 200, which must be 1 to 16"),
        (frame(FLOAT, 4, dimensions=65), "its number of dimensions is 65"),
        (frame(FLOAT, 4, inline=2), "its flag for an inline payload is 2"),
        (frame(FLOAT, 4, inline=0, payload_bytes=1 << 40), "its number of payload bytes is 1099511627776"),
        (frame(FLOAT, 4, chunk=-1), "its chunk is "),
        (frame(FLOAT, 4, kind=0), "which sends nothing"),
    ],
)
def test_a_damaged_message_is_refused(head: torch.Tensor, error: str) -> None:
    """Before memory is reserved for it, or anything is read as what it is not."""
    first, second = _C.TcpPeers(0, 2, HOST, SECRET), _C.TcpPeers(1, 2, HOST, SECRET)
    assert connect_both(first, second, 30.0) == []
    arrived: list[torch.Tensor] = []

    def forward(micro_batch: int, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        arrived.extend(inputs)
        raise ZeroDivisionError("that is enough")

    groups = dict.fromkeys(QUEUES, "")
    chunk = types.SimpleNamespace(forward=forward, reduce=None)
    executor = _C.Executor([chunk], 1, 2, groups, torch.device("cpu"), 30.0, "stage 1", second)
    first.send(head, True)
    with pytest.raises(_C.CommError if error else ZeroDivisionError, match=error or "enough"):
        executor.run(lower(generate("1f1b", pp=2, segments=1, micro_batches=1), reduce=False), 1, False, [0])
    assert [(list(t.shape), t.element_size()) for t in arrived] == ([] if error else [([2], int(head[33]))])
    executor.close()


def test_conjugate_and_negative_views_arrive_with_their_values() -> None:
    """Such a view has other bits in memory than its values; complex positions (RoPE) and `x.conj().imag` are ones."""
    one = torch.tensor([1 + 2j, 3 - 4j])
    sent = [one.conj(), one.conj().imag, one.conj().conj(), torch.ones(2, 3).t()]
    assert [(x.is_conj(), x.is_neg()) for x in sent] == [(True, False), (False, True), (False, False), (False, False)]
    first, second = _C.TcpPeers(0, 2, HOST, SECRET), _C.TcpPeers(1, 2, HOST, SECRET)
    assert connect_both(first, second, 30.0) == []
    arrived: list[torch.Tensor] = []

    def give(micro_batch: int, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        return sent, None

    def take(micro_batch: int, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        arrived.extend(inputs)
        return [], None

    forwards = lower(forward_only(2, 1, 1), reduce=False)
    executors = [
        _C.Executor(
            [types.SimpleNamespace(forward=forward, reduce=None)],
            *(stage, 2, dict.fromkeys(QUEUES, ""), torch.device("cpu"), 30.0, f"stage {stage}", peers),
        )
        for stage, (forward, peers) in enumerate(((give, first), (take, second)))
    ]
    giving = threading.Thread(target=executors[0].run, args=(forwards, 0, False, [0]))
    giving.start()
    executors[1].run(forwards, 1, False, [0])
    giving.join()
    for executor in executors:
        executor.close()
    for got, value in zip(arrived, sent, strict=True):
        assert torch.equal(got, value.resolve_conj().resolve_neg())
