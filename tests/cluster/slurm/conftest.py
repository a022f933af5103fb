"""One real Slurm for all tests here that need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fold3d.cli.main import main
from fold3d.cluster.slurm import commands
from fold3d.cluster.slurm.folder import Folder
from tests.helpers.slurm import missing, slurm, until


@pytest.fixture(scope="package")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _slurm: None) -> Iterator[Folder]:
    """The user's folder; what was submitted is cancelled behind the test."""
    monkeypatch.setenv("FOLD3D_CLUSTER", str(tmp_path / "folder"))
    made = Folder()
    yield made
    for wish in made.wishes()[0]:
        main(["cluster", "cancel", wish.name])
    assert until(lambda: not commands.queue())
