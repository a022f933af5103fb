"""docs/internals/schedule_ir.md shows what the tool says, and every picture can be drawn again.

After a wanted change:  FOLD3D_WRITE_DOCS=1 python -m pytest tests/cli/test_docs.py
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from transformers import GPT2Config

from fold3d import schedule
from fold3d.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "schedule_ir.md"
PAGES = {PAGE: 3, ROOT / "docs" / "tensor-parallel.md": 1}
"""Pages with outputs of the command, and how many at least."""
BAD = "0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n"  # bad.csv of the page
WRITE = os.environ.get("FOLD3D_WRITE_DOCS") == "1"

SHOWN = re.compile(r"```\n\$ fold3d (?P<command>[^\n]*)\n(?P<output>.*?)```", re.DOTALL)
DRAWN = re.compile(r"`fold3d (?P<command>draw [^`]*--png docs/img/(?P<name>\w+\.png))`")


@pytest.fixture
def _page_folder(tmp_path, monkeypatch):
    (tmp_path / "bad.csv").write_text(BAD)
    (tmp_path / "docs" / "img").mkdir(parents=True)
    GPT2Config(n_layer=4, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2-folder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.usefixtures("_page_folder")
@pytest.mark.parametrize("path, shown", PAGES.items(), ids=lambda value: getattr(value, "stem", ""))
def test_shown_output(capsys, path, shown):
    page = path.read_text()
    assert len(SHOWN.findall(page)) >= shown

    def rerun(shown: re.Match[str]) -> str:
        main(shlex.split(shown["command"]))
        streams = capsys.readouterr()
        return f"```\n$ fold3d {shown['command']}\n{streams.out}{streams.err}```"

    current = SHOWN.sub(rerun, page)
    if WRITE:
        path.write_text(current)
        page = current
    assert page == current


@pytest.mark.full
@pytest.mark.usefixtures("_page_folder")
def test_pictures(tmp_path):
    commands = list(DRAWN.finditer(PAGE.read_text()))
    assert {match["name"] for match in commands} == set(re.findall(r"\]\(\.\./img/(\w+\.png)\)", PAGE.read_text()))
    for match in commands:
        assert main(shlex.split(match["command"])) == 0
        drawn = (tmp_path / "docs" / "img" / match["name"]).read_bytes()
        if WRITE:
            (ROOT / "docs" / "img" / match["name"]).write_bytes(drawn)
        # Pixels depend on the version of matplotlib and its fonts: the committed picture must only exist.
        assert (ROOT / "docs" / "img" / match["name"]).read_bytes().startswith(b"\x89PNG")


def test_python_example(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(PAGE), "exec"), {})
    made = schedule.generate("aiao", pp=4, segments=2, micro_batches=8)
    expected = schedule.unit_timeline(made, forward=1, backward=2, send=0.5).makespan
    assert capsys.readouterr().out == f"{expected} {schedule.peak_stash(made)}\n"
