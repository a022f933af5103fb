"""The pages: links and anchors lead somewhere, code is valid, commands and messages are those of the code."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
from transformers import HfArgumentParser

from fold3d import TrainingArguments
from fold3d.cli.main import parser
from fold3d.observe.step_breakdown import make_breakdown
from fold3d.plan.simulator import RankBreakdown
from tests.helpers import pages, python_block
from tests.helpers.pages import PAGES, ROOT

EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=pages.name)
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"build", "out"}


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """As `make docs` builds it: every page is in the table of contents, every docstring of the reference readable."""
    words = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*words, "-d", tmp_path / "doctrees", "docs", tmp_path / "site"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "compatibility", "api"):
        assert (tmp_path / "site" / f"{page}.html").stat().st_size > 4000
    reference = (tmp_path / "site" / "api.html").read_text()
    for name in (
        "fold3d.Trainer.save_model",
        "fold3d.Engine.step",
        "fold3d.errors.RankError",
        "fold3d.schedule.generate",
    ):
        assert f'id="{name}"' in reference, name


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for target in [*pages.links(page), *pages.links(page, images=True)]:
        if target.startswith(("https://", "http://")):
            continue  # no test needs a network
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target}: no such file"
        assert not anchor or anchor in pages.anchors(there), f"{target}: headings are {sorted(pages.anchors(there))}"


@EVERY_PAGE
def test_it_reads_as_plain_markdown(page: Path) -> None:
    assert not list(pages.raw(page.read_text()))


def test_what_is_no_plain_markdown_is_found() -> None:
    table = "| a | b |\n| - | - |\n| c | [d](e.md) |\n"
    directives = ("```{toctree}\nlayout\n```", ":::{note}", "{doc}`layout`")
    for text in (*directives, "see [](layout.md)", f"{table}\n| e | f |"):
        assert len(list(pages.raw(text))) == 1, text
    assert not list(pages.raw(f"# A `{{title}}`\n\n[b](c.md), `{{d}}`\n\n{table}\n```python\n{{}}\n```\n"))


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    assert {(index.parent / link).resolve() for link in pages.links(index)} == set(pages.SITE) - {index}


def test_every_picture_is_shown() -> None:
    shown = {(page.parent / image).resolve() for page in PAGES for image in pages.links(page, images=True)}
    assert set((ROOT / "docs" / "img").iterdir()) <= shown


@EVERY_PAGE
def test_files_that_are_named_exist(page: Path) -> None:
    for span in pages.code_spans(page):
        if re.fullmatch(r"[\w./-]+", span) and span.split("/")[0] in FOLDERS and "/" in span and "NAME" not in span:
            found = (ROOT / span).exists() or list((ROOT / span).parent.glob(f"{Path(span).name}.*"))
            assert found, f"{span}: no such file"


@EVERY_PAGE
def test_python_is_valid(page: Path) -> None:
    for code in pages.blocks(page, "python"):
        assert not list(python_block.complaints(code)), code


def test_what_is_wrong_with_python_is_found() -> None:
    for line in (
        "from fold3d import Nobody",
        "import fold3d; fold3d.ParallelConfig(pipeline=2)",
        "engine.stop()",
        "trainer.engine.go()",
        "args.layout.width",
    ):
        assert len(list(python_block.complaints(line))) == 1, line
    assert not list(python_block.complaints("trainer.engine.flush()\nargs.layout.pp\nengine.step(batch).loss\n"))


def commands(page: Path) -> list[list[str]]:
    """Returns the words of every command that a shell runs on the page, those inside `bash -c` included."""
    found: list[list[str]] = []
    for code in pages.shell(page):
        for line in code.replace("\\\n", " ").splitlines():
            words = [*takewhile(lambda word: word != ">", shlex.split(line, comments=True))]
            found.append(words)
            found += [shlex.split(inner) for flag, inner in pairwise(words) if flag == "-c"]
    before = re.compile(r"[A-Z_]+=\S*|exec")
    return [list(dropwhile(before.fullmatch, words)) for words in found if words]


@EVERY_PAGE
def test_shell_is_valid(page: Path) -> None:
    for code in pages.shell(page):
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr + code


@EVERY_PAGE
def test_commands_take_their_arguments(page: Path) -> None:
    stock = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        if not words:
            continue
        if words[0] == "fold3d":
            parser().parse_args(words[1:])
        elif words[0] == "make" and "-C" not in words:
            assert set(words[1:]) <= targets, words
        elif words[0] == "torchrun":
            told = torchrun.parse_args([re.sub(r"\$\w+", "1", word) for word in words[1:]])
            script, rest = told.training_script, told.training_script_args
            if told.module:
                assert script == "fold3d", script
                parser().parse_args(rest)
                continue
            assert script == "train.py" or (ROOT / script).is_file(), script
            own = (ROOT / script).read_text() if script != "train.py" else ""
            for flag in (word for word in rest if word.startswith("--")):
                assert f"{flag[2:]}:" in own or flag in stock._option_string_actions, f"{script} takes no {flag}"
        elif "pytest" in words:
            for word in (word for word in words if "/" in word and word.split("/")[0] in FOLDERS):
                assert (ROOT / word.split("::")[0]).exists(), word


def test_every_subcommand_is_on_some_page() -> None:
    shown = {words[1] for page in PAGES for words in commands(page) if words[:1] == ["fold3d"]}
    (subcommands,) = (action for action in parser()._actions if action.choices and action.dest != "version")
    assert shown == set(subcommands.choices or ())


def test_the_manifest_fits_together() -> None:
    """Its pods find each other by the Service's name, and are as many as torchrun waits for."""
    page = ROOT / "docs" / "containers.md"
    service, job = (next(one for one in pages.manifests(page) if one["kind"] == kind) for kind in ("Service", "Job"))
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (words,) = (words[1:] for words in commands(page) if words[:1] == ["torchrun"] and "$JOB_COMPLETION_INDEX" in words)
    told = torchrun.parse_args([re.sub(r"\$\w+", "1", word) for word in words])
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(told.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert told.master_addr == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(told.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    (grace,) = (int(one["value"]) for one in container["env"] if one["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert grace < pod["terminationGracePeriodSeconds"]


@cache
def texts_of_the_code() -> str:
    """Returns all texts in the code, end to end; what is filled in is left out."""
    found = [(ROOT / "setup.py").read_text()]
    for path in sorted((ROOT / "fold3d").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    found += [path.read_text() for path in sorted((ROOT / "csrc").rglob("*.cpp"))]
    return "\n".join(found)


def test_messages_are_those_of_the_code() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    rows = re.findall(r"^\| `([^`]+)`(?! \(torch\)) \|", page.read_text(), re.MULTILINE)
    assert len(rows) > 15
    for message in rows:
        for part in (part.strip(" ,:;()") for part in message.split("…")):
            assert part in texts_of_the_code(), f"{message}: nothing says {part!r}"


def test_log_keys_are_those_of_the_code() -> None:
    shown = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "log-keys.md").read_text(), re.MULTILINE)
    part = RankBreakdown(
        compute_ms=1, bubble_ms=1, exposed_pp_ms=1, exposed_dp_ms=1, hidden_dp_ms=1, pp_bytes=1, dp_bytes=1
    )
    shards = {"waited_ns": 0, "hidden_ns": 0, "bytes": 0}
    moved = [("offload", "0OFFLOAD0", 0, 1, 8)]
    breakdown = make_breakdown(moved, 0, 1_000_000, predicted_ms=1.0, predicted=part, shards=shards)
    beside = ["tokens_per_second", "mfu", "loss_scale", "skipped_steps"]
    memory = ["peak_memory_gb", "peak_memory_mb", "peak_memory_rank", "predicted_peak_memory_mb"]
    assert sorted(shown) == sorted([*breakdown.log(dp=2, pp=2, tp=2), *beside, *memory])
    measuring = (ROOT / "fold3d" / "trainer" / "measuring.py").read_text()
    assert all(f'"{key}"' in measuring for key in beside + memory)
