"""benchmarks/gpu: says at once that there is no GPU, and runs its own logic on the CPU in tiny sizes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.ranks import Decoder, Part, race

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_gpu_it_says_so_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--look"], ["--processes", "2"]):
        assert gpu.main(words) == gpu.NO_GPU
        assert capsys.readouterr().err.startswith("no GPU: torch ")


def test_make_gpu_begins_with_a_look() -> None:
    said = subprocess.run(["make", "-n", "gpu"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    looks, tests, doctor, benchmark = (
        said.index(text) for text in ("benchmarks.gpu --look", "FOLD3D_REQUIRE_CUDA=1", "fold3d doctor", "--out")
    )
    assert looks < tests < doctor < benchmark


def test_turns_and_ratios() -> None:
    order: list[str] = []
    seconds = race({name: lambda name=name: order.append(name) for name in "ab"}, "cpu", rounds=2, steps=3)
    assert order == ["a"] * 3 + ["b"] * 3 + (["a"] * 3 + ["b"] * 3) * 2 and seconds.keys() == {"a", "b"}
    rows = gpu._rows("part", "us", {"torch": 4.0, "fold3d": 3.0})
    assert [row.ratio for row in rows] == [1.0, 0.75]
    assert "| part | fold3d | 3 us | 0.750 |" in gpu.report(rows, "cpu", 1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_of_torch_are_the_model(stages: int) -> None:
    model = Decoder(gpu.TINY)
    ids = torch.randint(0, gpu.TINY.vocabulary, (2, gpu.TINY.length))
    x = ids
    for stage in range(stages):
        x = Part(model, stage, stages)(x)
    whole = model(ids, ids)
    torch.testing.assert_close(torch.nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten()), whole)


def test_kernels_do_what_torch_does() -> None:
    systems = gpu.kernel_systems("cpu", gpu.TINY)
    assert systems.keys() == {"norm", "clip and AdamW", "100 small tensors"}
    for pair in systems.values():
        assert list(pair) == ["torch", "fold3d"]
        for run in pair.values():
            run()


@pytest.mark.dist
def test_everything_on_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert gpu.main(["--device", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    parts = [row["part"] for row in rows]
    wanted = {"one process", "2 replicas", "2 stages", "kernel: norm", "kernel: clip and AdamW", "sums of 2 replicas"}
    assert wanted < set(parts) and all(row["value"] > 0 for row in rows)
    text = capsys.readouterr().out
    assert "CPU: figures mean nothing" in text and "fold3d zero1, kernels" in text
