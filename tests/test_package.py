"""What `import fold3d` offers, and the two ways to the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fold3d
from fold3d import errors


def test_names_are_listed_and_there() -> None:
    listed = dir(fold3d)
    for name in fold3d.__all__:
        assert name in listed
        assert getattr(fold3d, name).__name__ == name
    assert {"Trainer", "TrainingArguments", "Engine", "ParallelConfig", "__version__"} <= set(listed)


@pytest.mark.parametrize("name", ["Fold3dError", "ConfigError", "TraceError", "CheckpointError", "RankError"])
def test_exceptions(name: str) -> None:
    assert getattr(fold3d, name) is getattr(errors, name)
    assert issubclass(getattr(fold3d, name), fold3d.Fold3dError)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'fold3d' has no attribute 'Trianer'"):
        fold3d.Trianer  # noqa: B018


def test_python_m_fold3d() -> None:
    command = [sys.executable, "-m", "fold3d", "draw", "gpipe", "-p", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "fold3d: --micro-batches is missing, as in: fold3d draw gpipe -p 4 -m 8\n"
    done = subprocess.run([sys.executable, "-m", "fold3d", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"fold3d {fold3d.__version__}\n"
