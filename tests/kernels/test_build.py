"""What a build compiles, and that nvcc compiles the CUDA halves for the GPUs that are promised."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
CUDA_SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))
ARCHITECTURES = ("80", "90", "100")
FILES = ["csrc/b.cpp", "csrc/a.cpp", "csrc/a.h", "csrc/kernels/x_cuda.cu", "csrc/README.md"]


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fold3d_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("torch_cuda", "nvcc", "why"),
    [
        (None, None, "the installed torch has no CUDA"),
        (None, "13.0", "the installed torch has no CUDA"),
        ("13.0", None, "nvcc was not found"),
        ("13.0", "12.8", "nvcc is of CUDA 12.8, the installed torch of CUDA 13.0"),
        ("12.6", "12.9", None),
        ("13.0", "13.0", None),
    ],
)
def test_what_is_compiled(setup: ModuleType, torch_cuda: str | None, nvcc: str | None, why: str | None) -> None:
    sources, reason = setup.chosen_sources(FILES, torch_cuda=torch_cuda, nvcc=nvcc)
    if why is None:
        assert reason is None and sources == ["csrc/a.cpp", "csrc/b.cpp", "csrc/kernels/x_cuda.cu"]
    else:
        assert why in reason and sources == ["csrc/a.cpp", "csrc/b.cpp"]


def test_every_source_is_compiled_once(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From scratch, in files that include those that need torch's headers."""
    monkeypatch.setattr(setup, "HERE", tmp_path)
    needs = [f"csrc/runtime/executor/{letter}.cpp" for letter in "abcdefg"]
    others = ["csrc/core/a.cpp", "csrc/runtime/kernels/x_cuda.cu"]
    made = setup.joined([*needs, *others], tmp_path / "build")
    included = [line.split('"')[1] for name in made[:2] for line in (tmp_path / name).read_text().splitlines()]
    assert made[2:] == others and included == [str(tmp_path / name) for name in needs]


def test_objects_do_not_overwrite_each_other() -> None:
    """The build names an object after its source without the suffix."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cpp", ".cu"}]
    assert len({path.with_suffix("") for path in sources}) == len(sources)


def test_the_version_of_nvcc(setup: ModuleType, tmp_path: Path) -> None:
    assert setup.nvcc_version(None) is None and setup.nvcc_version(str(tmp_path)) is None
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n")
    nvcc.chmod(0o755)
    assert setup.nvcc_version(str(tmp_path)) == "12.8"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    assert setup.nvcc_version(str(tmp_path)) is None


def nvcc() -> str:
    found = shutil.which("nvcc") or (f"{cpp_extension.CUDA_HOME}/bin/nvcc" if cpp_extension.CUDA_HOME else None)
    if found is None or not Path(found).exists():
        pytest.skip("nvcc, the compiler of CUDA's toolkit, is not on this machine")
    return found


@pytest.mark.full
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.stem)
def test_nvcc_compiles(source: Path, tmp_path: Path) -> None:
    """As setup.py does, for sm_80, sm_90 and sm_100 at once; without torch's headers, so in seconds."""
    flags = re.search(r'"nvcc": \[(.*?)\]', (ROOT / "setup.py").read_text())
    assert flags is not None
    words = [nvcc(), *re.findall(r'"([^"]+)"', flags[1]), "-Werror", "all-warnings", f"-I{ROOT / 'csrc'}"]
    words += [f"-gencode=arch=compute_{one},code=sm_{one}" for one in ARCHITECTURES]
    target = tmp_path / f"{source.stem}.o"
    done = subprocess.run([*words, "-c", source, "-o", target], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    inside = target.read_bytes()
    assert all(f"sm_{one}".encode() in inside for one in ARCHITECTURES)


def test_every_kernel_has_both_halves() -> None:
    for source in CUDA_SOURCES:
        header = (source.parent / f"{source.stem.removesuffix('_cuda')}.h").read_text()
        assert "namespace cpu {" in header and "namespace cuda {" in header
        assert source.with_name(source.name.replace("_cuda.cu", ".cpp")).exists()
    assert len(CUDA_SOURCES) == 3
