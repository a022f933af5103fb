"""The benchmarks that the pages name start as the pages say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks/cluster/README.md"]
COMMANDS = sorted(
    {found for page in PAGES for found in re.findall(r"python ((?:-m )?benchmarks[\w./]*)", page.read_text())}
)


def test_the_pages_name_them_all() -> None:
    named = {command.removeprefix("-m ").replace("/", ".").removesuffix(".py") for command in COMMANDS}
    there = {f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert there <= named


@pytest.mark.parametrize("command", COMMANDS)
def test_it_starts(command: str) -> None:
    words = [sys.executable, *command.split(), "--help"]
    made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert made.returncode == 0 and "usage:" in made.stdout, made.stderr
