"""What is published: the source distribution is complete, and what is built from it runs where nothing else is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.version import Version

import fold3d
from tests.helpers.example import DRAWN, EXAMPLE, TINY

ROOT = Path(__file__).resolve().parents[1]


def run(*words: object, cwd: Path, timeout: float = 120.0) -> str:
    """Runs a command as a user would: nothing of this environment's Python path leaks into it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=kept, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Message]:
    """The files of the source distribution, and the metadata."""
    folder = tmp_path_factory.mktemp("egg")
    run(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", folder, cwd=ROOT)
    (egg,) = folder.iterdir()
    return set((egg / "SOURCES.txt").read_text().split()), Parser().parsestr((egg / "PKG-INFO").read_text())


def requirements(metadata: Message) -> dict[str, Requirement]:
    """Returns what must be installed beside it, without what the extras ask for."""
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return {one.name: one for one in found if one.marker is None}


def test_a_build_finds_all_its_files(described: tuple[set[str], Message]) -> None:
    listed, _ = described
    in_the_tree = {
        str(path.relative_to(ROOT))
        for folder, suffixes in (("csrc", {".h", ".cpp", ".cu"}), ("fold3d", {".py", ".pyi", ".typed"}))
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes or path.name == "py.typed"
    }
    needed = in_the_tree | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"}
    assert "csrc/core/ir/action.h" in needed and "fold3d/py.typed" in needed
    assert not needed - listed
    extra = {name for name in listed - needed if not Path(name).is_absolute()}
    assert not extra, "neither tests nor what a build leaves belongs there"


def test_the_image_is_built_from_what_a_build_needs() -> None:
    """Docker is not where the tests are: what its file copies, runs and lets be set is looked at."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    copied = [word for step, rest in steps if step == "COPY" for word in rest.split()[:-1]]
    assert set(copied) >= {"csrc", "fold3d", "requirements.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(kept) and all((ROOT / name).exists() for name in copied)
    for step, rest in steps:
        if step == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True, timeout=60)
    settable = {rest.partition("=")[0] for step, rest in steps if step == "ARG"}
    page = (ROOT / "docs" / "containers.md").read_text()
    assert {"BASE", "TORCH_INDEX"} <= set(re.findall(r"--build-arg (\w+)=", page)) <= settable


def test_what_it_needs_is_what_was_tested(described: tuple[set[str], Message]) -> None:
    needs = requirements(described[1])
    torch_minor = ".".join(torch.__version__.split(".")[:2])
    assert str(needs["torch"].specifier) == f"=={torch_minor}.*", "the extension is bound to the torch of the build"
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if re.match(r"[\w.-]+==", line))
    for name, requirement in needs.items():
        assert requirement.specifier.contains(pinned[name]), f"{requirement}, but {pinned[name]} is tested"
    assert pinned["transformers"] == transformers.__version__
    tested = Version(pinned["transformers"])
    for other in (f"{tested.major}.{tested.minor + 1}.0", f"{tested.major}.{tested.minor - 1}.9"):
        assert not needs["transformers"].specifier.contains(other), f"the tests never ran with {other}"


def test_metadata(described: tuple[set[str], Message]) -> None:
    metadata = described[1]
    assert metadata["Version"] == fold3d.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    for field in ("Summary", "Author", "Keywords", "Requires-Python", "Description-Content-Type"):
        assert metadata[field], field
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_a_wheel_s_version_names_torch_and_cuda() -> None:
    """`make wheel` would build it with this tag, and pip takes it for fold3d's version."""
    commands = run("make", "--no-print-directory", "-n", "wheel", cwd=ROOT)
    (tag,) = set(re.findall(r"\+(pt\w+)", commands))
    cuda = torch.version.cuda
    assert tag == "pt" + "".join(torch.__version__.split(".")[:2]) + (f"cu{cuda.replace('.', '')}" if cuda else "cpu")
    assert Version(f"{fold3d.__version__}+{tag}").public == fold3d.__version__


@pytest.mark.dist
def test_the_source_distribution_builds_a_wheel_that_runs_the_example(tmp_path: Path) -> None:
    """In a fresh environment, which sees the tested packages through a path file: torch is not fetched again."""
    run(sys.executable, "setup.py", "--quiet", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path, cwd=ROOT)
    (source,) = tmp_path.glob("fold3d-*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    wheels = tmp_path / "wheels"
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", wheels, source, cwd=tmp_path, timeout=1500.0)
    (wheel,) = wheels.glob("fold3d-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"fold3d/py.typed", "fold3d/_C.pyi", "fold3d/trainer/trainer.py"} <= names
    assert all(name.startswith(("fold3d/", "fold3d-")) for name in names)

    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", fresh, cwd=tmp_path)
    python = fresh / "bin" / "python"
    run(python, "-m", "pip", "--quiet", "uninstall", "--yes", "setuptools", cwd=tmp_path)  # older than what torch needs
    run(python, "-m", "pip", "--quiet", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site = next(fresh.glob("lib/python*/site-packages"))
    (site / "tested.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    assert "No broken requirements" in run(python, "-m", "pip", "check", cwd=tmp_path)
    assert fold3d.__version__ in run(fresh / "bin" / "fold3d", "--version", cwd=tmp_path)
    assert str(site) in run(python, "-c", "import fold3d; print(fold3d.__file__)", cwd=tmp_path)
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = tmp_path / "out"
    said = run(
        *torchrun,
        EXAMPLE,
        *TINY,
        *DRAWN,
        "--pp",
        "2",
        "--segments",
        "2",
        "--use_cpu",
        "--output_dir",
        out,
        cwd=tmp_path,
        timeout=300.0,
    )
    assert "eval_loss" in said and (out / "model.safetensors").stat().st_size > 0
