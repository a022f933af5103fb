"""What the pages and the examples promise: the code in them runs, and the diff in them is the real one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers import example, pages
from tests.helpers.example import EXAMPLE, EXAMPLES, FEW, IN_SINGLE, SMALL, TINY
from tests.helpers.launch import launch
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import clean

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def diff_of_the_example() -> list[tuple[str, str]]:
    """Returns the (stock, fold3d) lines of the README's second diff."""
    lines = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)[1].splitlines()
    removed = [line[1:] for line in lines if line.startswith("-")]
    added = [line[1:] for line in lines if line.startswith("+")]
    return list(zip(removed, added, strict=True))


def test_the_example_is_the_stock_script_but_for_two_lines(tmp_path: Path) -> None:
    """With the README's diff undone, it runs under plain transformers."""
    script = EXAMPLE.read_text()
    changes = diff_of_the_example()
    assert len(changes) == 2
    for stock, ours in changes:
        assert script.count(f"\n{ours}") == 1, ours
        script = re.sub(rf"\n{re.escape(ours)}[^\n]*", f"\n{stock}", script)
    code = [line for line in script.splitlines() if "import" in line or "(" in line]
    assert not any("fold3d" in line for line in code if not line.strip().startswith(("#", '"')))
    (tmp_path / "stock.py").write_text(script)
    command = [sys.executable, "stock.py", *TINY, "--use_cpu", "--output_dir", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.dist
def test_the_example_trains_on_four_ranks(tmp_path: Path) -> None:
    layout = ["--dp", "2", "--pp", "2", "--segments", "2", "--schedule", "aiao", "--timeline", "2"]
    result = launch(EXAMPLE, 4, *TINY, *layout, "--output_dir", str(tmp_path), timeout=200)
    assert [rank.returncode for rank in result] == [0] * 4, result.report()
    assert not result.orphans
    assert all(rank.stdout == "" for rank in result[1:]), "only rank 0 prints"
    said = result[0].stdout
    assert re.search(r"step 3/3  loss \S+  grad \S+  lr \S+  \d+ tok/s  \d+ ms  .*other \d+ %", said), said
    for word in ("eval_loss", "Loss on text that was held back", "What it expects next", "A sample of", "Try next"):
        assert word in said, f"{word} is missing in\n{said}"
    for name in ("model.safetensors", "timeline/step-2.png", "timeline/step-2.json", "eval_results.json"):
        assert (tmp_path / name).stat().st_size > 0
        assert str(tmp_path / name) in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.n_layer == 4 and not any(p.is_meta for p in model.parameters())


@pytest.mark.dist
def test_the_example_plans_by_itself_and_says_what_was_hidden(tmp_path: Path) -> None:
    """As `make demo` runs it: nothing is said about segments, schedule and DP.sync."""
    layout = ["--dp", "2", "--pp", "2", "--gradient_accumulation_steps", "4", "--max_steps", "8"]
    result = launch(EXAMPLE, 4, *TINY, *layout, "--output_dir", str(tmp_path), timeout=200)
    assert [rank.returncode for rank in result] == [0] * 4, result.report()
    said = result[0].stdout + result[0].stderr
    for text in (
        r"\nfold3d: the planner chose \d+ segments?, \w",
        r"pin it with --segments \d+ --schedule \w+ ",
        r"A step took \d+ ms: compute \d+ \+ bubble \d+ \+ PP.sync \d+ \+ DP.sync \d+ \+ other \d+\.",
        r"gradients over the replicas took \d+ ms of network time; \d+ ms \(\d+%\) were hidden under computation",
    ):
        assert re.search(text, said), f"{text} is missing in\n{said}"
    everywhere = "".join(rank.stdout + rank.stderr for rank in result)
    assert everywhere.count("the planner chose") == 1


@pytest.mark.gate
@pytest.mark.dist
def test_the_demo_in_twenty_steps(tmp_path: Path) -> None:
    """The command of `make demo`, with fewer steps."""
    print_it = ["make", "--no-print-directory", "-n", "demo", f"OUT={tmp_path}"]
    make = subprocess.run(print_it, cwd=ROOT, capture_output=True, text=True, timeout=60)
    command = make.stdout.replace("\\\n", " ").splitlines()[-1]
    assert "torchrun" in command and str(tmp_path) in command, make.stdout + make.stderr
    command += " --max_steps 20 --warmup_steps 2 --logging_steps 5 --timeline 10"
    command += " --gradient_accumulation_steps 4 --eval_sequences 16 --hidden 160 --layers 4 --vocabulary 1024"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(text) for text in re.findall(r"step \d+/20  loss (\S+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5, done.stdout
    for text in ("the planner chose", "were hidden under computation", "A sample of"):
        assert text in done.stdout + done.stderr, f"{text} is missing in\n{done.stdout}{done.stderr}"
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "timeline/step-10.png").exists()


@pytest.mark.dist
def test_the_engine_example_of_the_pages_runs(tmp_path: Path) -> None:
    (code,) = pages.blocks(ROOT / "docs" / "engine.md", "python")
    before = (
        "from tests.helpers import data, models\n"
        "model = models.build_plain(layers=4)\n"
        "batches = [data.batch(16, 8, start=1000 * step) for step in range(2)]\n"
    )
    (tmp_path / "loop.py").write_text(before + code + "engine.close()\ndist.destroy_process_group()\n")
    result = launch(tmp_path / "loop.py", 4, timeout=120)
    assert [rank.returncode for rank in result] == [0] * 4, result.report()
    losses = {rank.stdout.splitlines()[-1] for rank in result}
    assert len(losses) == 1 and "tensor(" in losses.pop(), result.report()


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {EXAMPLE.name, *(case.partition(" ")[0] for case in SMALL)}
    listed = (ROOT / "docs" / "examples.md").read_text()
    assert all(f"(../examples/{name})" in listed for name in scripts)


def compare(case: str, folder: Path, ranks: RankPool, layout: dict[str, int]) -> None:
    """Compares what the script logs on this layout with what it logs without fold3d."""
    name = case.partition(" ")[0]
    if name == "sft_lora.py":
        pytest.importorskip("trl", reason="TRL is not installed: pip install fold3d[trl]")
    if "--load_in_4bit" in case:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    replicas = layout.get("dp", 1)
    stock = folder / name
    stock.write_text(example.as_stock(EXAMPLES / name))
    arguments = [*SMALL[case], *FEW, "--gradient_accumulation_steps"]
    wanted = clean(example.run(str(stock), str(folder / "stock"), [*arguments, str(2 * replicas)]))
    assert wanted[0]["loss"] > 0
    options = [word for key, value in layout.items() for word in (f"--{key}", str(value))]
    count = replicas * layout.get("pp", 1)
    ours = ranks.run(example.run, count, str(EXAMPLES / name), str(folder / "ours"), [*arguments, "2", *options])[0]
    assert len(ours) == len(wanted)
    tolerance = 2e-6 if {*case.split()}.isdisjoint(IN_SINGLE) else 1e-4  # the stock loop sums losses in float32
    if "--load_in_4bit" in case:  # TRL then trains adapters in bfloat16
        tolerance = 1e-2
    for mine, theirs in zip(clean(ours), wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if replicas == 1 or key != "eval_loss":  # replicas share a batch out: a mean of other parts
                assert mine[key] == pytest.approx(value, rel=tolerance), key


@pytest.mark.parametrize("case", SMALL)
def test_a_task_cut(case: str, ranks: RankPool, tmp_path: Path) -> None:
    compare(case, tmp_path, ranks, {"pp": 2})


def test_a_task_on_replicas(ranks: RankPool, tmp_path: Path) -> None:
    compare("finetune_bert_classification.py", tmp_path, ranks, {"dp": 2, "pp": 2})
