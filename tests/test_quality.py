"""The tools of the house, as in requirements.txt; `make lint` runs these, `make format` mends most."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
CPP = sorted(
    str(path.relative_to(ROOT))
    for folder in ("csrc", "tests/cpp", "simdevice")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".h", ".cpp", ".cu"}
)
TEXT = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "Makefile",
    "docs",
    "csrc",
    "fold3d",
    "tests",
    "examples",
]
TEXT += ["zoo", "simdevice", "benchmarks", "scripts", "conftest.py", "setup.py", "pyproject.toml"]

TOOLS = {
    "ruff check": [BIN / "ruff", "check", "."],
    "ruff format": [BIN / "ruff", "format", "--check", "."],
    "clang-format": [BIN / "clang-format", "--dry-run", "-Werror", *CPP],
    "mypy": [BIN / "mypy", "--strict", "fold3d"],
    "codespell": [BIN / "codespell", *TEXT],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tool_is_content(tool: str) -> None:
    done = subprocess.run(TOOLS[tool], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{tool}; `make format` may help\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "fold3d/py.typed"])
def test_file_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_pre_commit_runs_what_is_installed() -> None:
    """Each hook is local and starts a program of .venv or a script of ours: nothing is fetched."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = [line.split(":", 1)[1].split() for line in text.splitlines() if line.strip().startswith("entry:")]
    assert text.count("- repo:") == text.count("- repo: local") == 1 and len(entries) == 5
    for program, *_ in entries:
        assert (BIN / Path(program).name).exists() or (ROOT / program).exists(), program


def test_pytest_looks_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """By itself it passes over folders with some names, such as `dist`, without a word."""
    patterns = pytestconfig.getini("norecursedirs")
    rooms = [ROOT / room for room in pytestconfig.getini("testpaths")]
    folders = {path.parent.relative_to(ROOT) for room in rooms for path in room.rglob("test_*.py")}
    missed = {str(f) for f in folders for part in f.parts for pattern in patterns if fnmatch(part, pattern)}
    assert not missed and Path("tests/dist") in folders
