"""run_ranks(): a function on several fresh processes of this machine, one thread each, which can meet by gloo."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch


def run_ranks(work: Callable[..., Any], world: int, *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """Returns what `work(*arguments)` returned on each rank.

    The launcher's variables are set, so that `dist.init_process_group("gloo")` needs no more.

    Args:
        work: from the top of a module.
        timeout: seconds until each has answered.
    Raises: RuntimeError when a rank ends or says nothing; the others are ended then.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        arguments_of_all = (work, rank, world, port, arguments, theirs)
        processes.append(context.Process(target=_serve, args=arguments_of_all, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        found = [_answer(rank, pipe, timeout) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.join(timeout)
    finally:
        for process in processes:
            process.kill()
    return found


def _serve(
    work: Callable[..., Any], rank: int, world: int, port: int, arguments: tuple[Any, ...], answers: Connection
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    answers.send(work(*arguments))


def _answer(rank: int, pipe: Connection, timeout: float) -> Any:
    try:
        if pipe.poll(timeout):
            return pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} ended; its error is above") from None
    raise RuntimeError(f"rank {rank} said nothing for {timeout:.0f} s")
