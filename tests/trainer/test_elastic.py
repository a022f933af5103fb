"""Four processes, a host is lost, two go on, the host comes back: without a hand, under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.call import free_port
from tests.trainer.elastic import BACK, LOST, PATIENCE_S, STEPS, losses

pytestmark = [pytest.mark.dist, pytest.mark.full]
ROOT = Path(__file__).parents[2]
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
"""How soon torchrun takes a host for lost, and how long it waits for more than the fewest hosts."""


def host(folder: Path, settings: dict[str, Any], port: int, number: int, hosts: str) -> subprocess.Popen[bytes]:
    """Starts a launcher with two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", hosts, "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    command += ["--rdzv-conf", f"{RENDEZVOUS},is_host={int(number == 0)}", "-m", "tests.trainer.elastic"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment |= {"FOLD3D_TEST_HOST": str(number), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / f"host-{number}.log", "ab") as log:
        return subprocess.Popen(
            [*command, str(folder), json.dumps(settings)],
            env=environment,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )


def said(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(folder.glob("host-*.log")))


def run(folder: Path, settings: dict[str, Any], *, is_lost: bool) -> None:
    """Runs the training on two hosts to its end; with `is_lost` the second one starts a second time."""
    folder.mkdir()
    port, hosts = free_port(), "1:2" if is_lost else "2:2"
    if not is_lost:
        (folder / "whole").touch()
    running = [host(folder, settings, port, number, hosts) for number in (0, 1)]
    deadline = time.monotonic() + PATIENCE_S
    try:
        if is_lost:
            while not (folder / "alone").exists():
                assert time.monotonic() < deadline and running[0].poll() is None, said(folder)
                time.sleep(0.1)
            assert running[1].wait(10.0) == -signal.SIGKILL
            running.append(host(folder, settings, port, 1, hosts))
        ends = [one.wait(max(1.0, deadline + PATIENCE_S - time.monotonic())) for one in running]
        assert [code for code in ends if code != -signal.SIGKILL] == [0, 0], said(folder)
    finally:
        for one in running:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()


@pytest.mark.parametrize(
    "settings",
    [{"pp": 2, "segments": 1}, {"parallel": "auto", "global_batch_size": 8, "gradient_accumulation_steps": 1}],
    ids=["pp2", "auto"],
)
def test_a_host_is_lost_and_comes_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    run(tmp_path / "whole", settings, is_lost=False)
    run(tmp_path / "lost", settings, is_lost=True)
    whole, lost = losses(tmp_path / "whole"), losses(tmp_path / "lost")
    assert sorted(whole) == sorted(lost) == list(range(1, STEPS + 1))
    assert {world for step in range(1, LOST + 1) for world, _ in lost[step]} == {4}, lost
    assert {world for step in range(LOST + 1, BACK + 1) for world, _ in lost[step]} == {2}, lost
    assert {world for step in range(BACK + 1, STEPS + 1) for world, _ in lost[step]} == {4}, lost
    for step, some in lost.items():
        for _, loss in some:  # transformers computes the loss in float32, whatever the model is
            assert loss == pytest.approx(whole[step][0][1], rel=2e-7), step
    weights = [load_file(tmp_path / name / f"out/checkpoint-{STEPS}/model.safetensors") for name in ("whole", "lost")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=1e-12)
