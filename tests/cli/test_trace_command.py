"""`fold3d trace` on transformers configurations and on plain modules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from fold3d.cli.main import main


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def plain() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Plain(), {"x": torch.zeros(2, 4)}


def uneven() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = Plain()
    model.layers[3] = nn.Linear(8, 8, bias=False)
    return model, {"x": torch.zeros(2, 4)}


def without_example() -> nn.Module:
    return Plain()


def nothing() -> None:
    return None


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"n_layer": 5, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    GPT2Config(**sizes, architectures=["GPT2LMHeadModel"]).save_pretrained(folder)
    return folder


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["trace", *arguments])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def rows(out: str, header: str) -> list[list[str]]:
    lines = out.splitlines()
    (begin,) = [i for i, line in enumerate(lines) if line.startswith(header)]
    table = lines[begin + 1 :]
    return [line.split() for line in (table[: table.index("")] if "" in table else table)]


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_transformers_model(capsys, gpt2_folder, name: str):
    code, out, _ = run(capsys, str(gpt2_folder / name), "-p", "2", "-s", "2")
    assert code == 0
    assert out.startswith("GPT2LMHeadModel, ")
    assert "FLOPs of one forward on input_ids (1, 16)" in out
    blocks = rows(out, "block")
    assert [row[:2] for row in blocks if row[0][0].isdigit()] == [
        ["0", "transformer.h.0"],
        ["1..4", "transformer.h.1..4"],
    ]
    assert "one tensor: transformer.wte.weight = lm_head.weight" in out
    chunks = rows(out, "chunk")
    assert [(row[0], row[1], row[2]) for row in chunks] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
    ]
    spans = [tuple(map(int, row[3].split(".."))) for row in chunks]
    assert [k for lo, hi in spans for k in range(lo, hi + 1)] == list(range(5))
    shares = [float(row[-2]) for row in chunks]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_json(capsys, gpt2_folder):
    code, out, _ = run(capsys, str(gpt2_folder), "-p", "2", "-t", "2", "--json")
    told = json.loads(out)
    assert code == 0 and told["model"] == "GPT2LMHeadModel"
    assert [row["block"] for row in told["blocks"]] == ["before", 0, 1, 2, 3, 4, "after"]
    assert told["blocks"][2]["name"] == "transformer.h.1" and told["blocks"][2]["received_bytes"] > 0
    assert told["tied"] == [["transformer.wte.weight", "lm_head.weight"]]
    assert [row["blocks"] for row in told["chunks"]] == [[0, 2], [3, 4]]
    assert sum(row["flops"] for row in told["chunks"]) == sum(row["flops"] for row in told["blocks"])
    assert {"name", "split", "whole", "rank", "reason"} == set(told["sharding"][0])
    assert json.loads(run(capsys, str(gpt2_folder), "--json")[1])["chunks"] is None


def test_blocks_that_differ_have_rows_of_their_own(capsys):
    _, out, _ = run(capsys, f"{__name__}:uneven", "--blocks", "layers")
    assert [row[:2] for row in rows(out, "block")][1:-1] == [
        ["0", "layers.0"],
        ["1..2", "layers.1..2"],
        ["3", "layers.3"],
    ]


def test_without_sizes_no_chunks(capsys, gpt2_folder):
    assert "chunk" not in run(capsys, str(gpt2_folder))[1]


def test_a_plain_module(capsys):
    code, out, _ = run(capsys, f"{__name__}:plain", "-p", "2", "--blocks", "layers")
    assert code == 0
    assert out.startswith("Plain, 328 parameters\nFLOPs of one forward on x (2, 4)\n")
    assert ["before", "first", "40", "128"] in rows(out, "block")
    assert [row[3] for row in rows(out, "chunk")] == ["0..1", "2..3"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "'nowhere' is neither a folder, nor a config.json, nor MODULE:FUNCTION"),
        (["no.such.module:f"], "No module named 'no'"),
        ([f"{__name__}:missing"], "has no attribute 'missing'"),
        ([f"{__name__}:nothing"], "returned a NoneType, not a torch.nn.Module"),
        ([f"{__name__}:without_example"], "an example batch is needed"),
        ([f"{__name__}:plain", "-p", "0"], "--pp must be at least 1, got 0"),
        ([f"{__name__}:plain", "-p", "8"], "8 chunks (pp * segments) are asked for, but the model has 4 blocks"),
    ],
)
def test_errors_teach(capsys, arguments: list[str], message: str):
    code, _, err = run(capsys, *arguments)
    assert code == 1
    assert err.startswith("fold3d: ") and message in err


def test_a_name_on_the_hub(gpt2_folder, tmp_path):
    """It is found where transformers keeps what was loaded before."""
    kept = tmp_path / "models--somebody--small.gpt"
    shutil.copytree(gpt2_folder, kept / "snapshots" / "1234")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("1234")
    words = [sys.executable, "-m", "fold3d", "trace"]
    told, of_folder = (
        subprocess.run(
            [*words, name], capture_output=True, text=True, env={**os.environ, "HF_HUB_CACHE": str(tmp_path)}
        )
        for name in ("somebody/small.gpt", str(gpt2_folder))
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout == of_folder.stdout


def test_a_misspelled_file_is_no_name_on_the_hub(capsys):
    code, _, err = run(capsys, "none.json")
    assert code == 1 and "'none.json' is neither a folder, nor a config.json, nor a name on the hub" in err


def test_a_folder_that_is_no_model(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hello": 1}))
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1 and "holds no transformers configuration" in err


def test_an_unknown_architecture(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["Nobody"]}))
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1 and "names no known architecture (['Nobody'])" in err


def test_tensor_parallel_table(capsys, gpt2_folder):
    code, out, _ = run(capsys, str(gpt2_folder), "-t", "2")
    assert code == 0
    table = {row[0]: row[1:] for row in rows(out, "module")}
    assert table["transformer.h.0..4.attn.c_attn"][:5] == ["column", "63.4", "kB", "31.7", "kB"]
    assert table["transformer.h.0..4.attn.c_proj"][0] == "row"
    assert table["transformer.h.0..4.ln_1"][:5] == ["whole", "1.28", "kB", "1.28", "kB"]
    assert table["transformer.wte"][0] == "vocabulary"
    assert "numbers on a rank: attn.split_size: 32 -> 16" in out


def test_tensor_parallel_table_with_exceptions(capsys, gpt2_folder):
    plan = json.dumps({"mlp.*": "replicate"})
    code, out, _ = run(capsys, str(gpt2_folder), "-t", "2", "--tp-plan", plan)
    assert code == 0
    table = {row[0]: " ".join(row[1:]) for row in rows(out, "module")}
    assert table["transformer.h.0..4.mlp.c_fc"] == 'whole 84.5 kB 84.5 kB tp_plan says "replicate"'


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["-t", "4"], "2 units are fewer than tp=4"),
        (["-t", "0"], "--tp must be at least 1, got 0"),
        (["--tp-plan", "{}"], "--tp-plan has no effect without --tp"),
        (["-t", "2", "--tp-plan", "mlp"], "'mlp' is no JSON"),
        (["-t", "2", "--tp-plan", "[]"], "must be a JSON object"),
        (["-t", "2", "--tp-plan", '{"mpl": "replicate"}'], "tp_plan['mpl'] matches no module"),
    ],
)
def test_tensor_parallel_refusals(capsys, gpt2_folder, arguments, says):
    code, _, err = run(capsys, str(gpt2_folder), *arguments)
    assert code != 0 and says in err


def test_a_block_that_is_one_layer(capsys):
    code, _, err = run(capsys, f"{__name__}:plain", "-t", "2")
    assert code != 0 and "layers.0.weight" in err and "cannot be divided: what it computes leaves the block" in err
    code, _, err = run(capsys, f"{__name__}:plain", "-t", "2", "--tp-plan", '{"layers.*": "replicate"}')
    assert code == 0, err
