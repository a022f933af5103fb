"""The pool and the launcher that every process test relies on."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import device
from tests.helpers.launch import launch
from tests.helpers.ranks import RankError, RankPool


def total(value: int) -> dict[str, object]:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    pid, threads = os.getpid(), torch.get_num_threads()
    return {
        "sum": tensor.item(),
        "pid": pid,
        "threads": threads,
        "rank": os.environ["RANK"],
        "draw": torch.rand(()).item(),
    }


def tensors(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    return x * scale + dist.get_rank()


def accelerate_sees() -> tuple[int, int]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator.process_index, accelerator.num_processes


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"broken on purpose on {rank}")
    dist.barrier()


def raise_without_meeting(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"broken on purpose on {rank}")


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait(60)


def first_leaves(seconds: float) -> float:
    """Rank 0 returns at once; returns when its connections were cut, as seen from the others; `seconds` if never."""
    if dist.get_rank() == 0:
        return 0.0
    start = time.monotonic()
    never = dist.irecv(torch.zeros(1), src=0)
    with contextlib.suppress(RuntimeError):
        never.wait(datetime.timedelta(seconds=seconds))
    return time.monotonic() - start


def parent() -> tuple[int, bool]:
    """Returns this process's parent, and whether that has loaded torch."""
    return os.getppid(), "libtorch" in Path(f"/proc/{os.getppid()}/maps").read_text()


def end_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), getattr(signal, how))


def leave_child_on(rank: int) -> None:
    if dist.get_rank() == rank:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


class TestPool:
    def test_same_processes_serve_every_call(self, ranks: RankPool) -> None:
        first, second = ranks.run(total, 4, 10), ranks.run("tests.helpers.test_ranks:total", 4, 20)
        assert [r["sum"] for r in first] == [46] * 4 and [r["sum"] for r in second] == [86] * 4
        assert [r["pid"] for r in first] == [r["pid"] for r in second] and len({r["pid"] for r in first}) == 4
        assert [r["rank"] for r in first] == list("0123") and {r["threads"] for r in first} == {1}
        assert first[0]["draw"] == second[0]["draw"], "each call starts from the same seed"

    @pytest.mark.skipif(device.chosen() == "cuda", reason="CUDA does not survive a fork")
    def test_they_are_forked_from_one_process_that_has_loaded_torch(self, ranks: RankPool) -> None:
        ((server, has_torch),) = set(ranks.run(parent, 4))
        assert has_torch and server != os.getpid()

    def test_smaller_worlds_tensors_and_keywords(self, ranks: RankPool) -> None:
        results = ranks.run(tensors, 2, torch.ones(3), scale=2.0)
        assert [r.tolist() for r in results] == [[2.0] * 3, [3.0] * 3]

    def test_accelerate_forgets_the_last_call(self, ranks: RankPool) -> None:
        assert ranks.run(accelerate_sees, 4) == [(r, 4) for r in range(4)]
        assert ranks.run(accelerate_sees, 2) == [(r, 2) for r in range(2)]
        assert ranks.run(accelerate_sees, 1) == [(0, 1)]

    def test_exception_shows_its_traceback_and_keeps_the_pool(self, ranks: RankPool) -> None:
        ranks.run(total, 4, 0)
        starts = ranks.starts
        with pytest.raises(RankError, match="broken on purpose on 1") as caught:
            ranks.run(raise_on, 2, 1)
        assert "in raise_on" in caught.value.failures[1]
        assert ranks.run(total, 4, 0)[0]["sum"] == 6 and ranks.starts == starts

    def test_a_rank_that_is_done_keeps_its_groups_until_all_are(self, ranks: RankPool) -> None:
        """gloo may still be connecting on the others; they would fail with "Connection closed by peer"."""
        assert all(waited >= 0.5 for waited in ranks.run(first_leaves, 3, 0.5)[1:])

    def test_good_ranks_leave_when_one_fails(self, ranks: RankPool) -> None:
        ranks.run(total, 4, 0)
        starts = ranks.starts
        with pytest.raises(RankError, match="broken on purpose on 2") as caught:
            ranks.run(raise_without_meeting, 4, 2)
        assert list(caught.value.failures) == [2]
        assert ranks.run(total, 4, 0)[0]["sum"] == 6 and ranks.starts == starts

    @pytest.mark.dist
    def test_hang_shows_the_stack_and_restarts(self) -> None:
        pool = RankPool(2)
        try:
            with pytest.raises(RankError, match="in hang_on") as caught:
                pool.run(hang_on, 2, 1, timeout=2.0)
            assert list(caught.value.failures) == [1]
            assert pool.run(total, 2, 0)[0]["sum"] == 1 and pool.starts == 2
            with pytest.raises(RankError, match="the process died, exit code -9"):
                pool.run(end_on, 2, 0, "SIGKILL", timeout=20.0)
            assert pool.run(total, 1, 5)[0]["sum"] == 5 and pool.starts == 3
        finally:
            pool.close()

    def test_refuses_what_it_cannot_run(self, ranks: RankPool) -> None:
        with pytest.raises(TypeError, match="top of a module"):
            ranks.run(lambda: None, 2)
        with pytest.raises(ValueError, match="ranks8"):
            ranks.run(total, 5, 0)


@pytest.mark.dist
class TestLaunch:
    def test_exit_codes_and_output(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import os, sys\nimport torch.distributed as dist\n"
            "dist.init_process_group('gloo')\ndist.barrier()\nprint('hello', dist.get_rank(), sys.argv[1])\n"
            "dist.destroy_process_group()\nsys.exit(dist.is_initialized() or int(os.environ['RANK']))\n"
        )
        result = launch(script, 2, "there", timeout=60)
        assert [r.returncode for r in result] == [0, 1], result.report()
        assert [r.stdout for r in result] == ["hello 0 there\n", "hello 1 there\n"]
        assert not result.orphans

    def test_killed_and_stopped_ranks(self) -> None:
        killed = launch(end_on, 2, 1, "SIGKILL", timeout=60)
        assert [r.returncode for r in killed] == [0, -signal.SIGKILL], killed.report()
        stopped = launch(end_on, 2, 1, "SIGSTOP", timeout=60)
        assert [r.stopped for r in stopped] == [False, True], stopped.report()
        assert not any(r.timed_out for r in [*killed, *stopped])

    def test_timeout_kills_everything(self, tmp_path: Path) -> None:
        script = tmp_path / "hang.py"  # without torch, so that the timeout is not spent on imports
        script.write_text("import os, time\nif os.environ['RANK'] == '0': time.sleep(60)\n")
        start = time.monotonic()
        result = launch(script, 2, timeout=8)
        assert [r.timed_out for r in result] == [True, False], result.report()
        assert time.monotonic() - start < 30

    def test_orphans_are_found_and_killed(self) -> None:
        result = launch(leave_child_on, 1, 0, timeout=60)
        assert len(result.orphans) == 1 and "time.sleep(60)" in result.orphans[0], result.report()
