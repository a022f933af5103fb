"""Builds fold3d._C, the C++ extension. Run by pip with --no-build-isolation, because it needs the installed torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def chosen_sources(files: Iterable[str], *, torch_cuda: str | None, nvcc: str | None) -> tuple[list[str], str | None]:
    """Returns the files to compile, and why the CUDA kernels are not among them; None: they are.

    All else is the same for CPU and CUDA: streams and events are reached through c10's device-generic ones.

    Args:
        files: all sources.
        torch_cuda: CUDA version that the installed torch was built with, such as "13.0"; None: it has no CUDA.
        nvcc: version of the compiler that was found; None: none was.
    """
    why = None
    if torch_cuda is None:
        why = "the installed torch has no CUDA"
    elif nvcc is None:
        why = "nvcc was not found; install the CUDA toolkit, or set CUDA_HOME to where it is"
    elif nvcc.split(".")[0] != torch_cuda.split(".")[0]:
        why = f"nvcc is of CUDA {nvcc}, the installed torch of CUDA {torch_cuda}; set CUDA_HOME to one of that version"
    suffixes = {".cpp"} if why else {".cpp", ".cu"}
    return sorted(name for name in files if Path(name).suffix in suffixes), why


def joined(sources: Iterable[str], folder: Path) -> list[str]:
    """Returns the sources to compile from scratch: in place of those that need torch's headers, files that include up
    to five of one folder. The headers take the compiler longer than what is in our files.

    Args:
        folder: gets these files.
    """
    together: dict[str, list[str]] = {}
    alone = []
    for name in sources:
        part = Path(name).parent
        if Path(name).suffix == ".cpp" and part.parts[1] in ("bindings", "ops", "runtime"):
            together.setdefault("-".join(part.parts), []).append(name)
        else:
            alone.append(name)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for part, names in together.items():
        for first in range(0, len(names), 5):
            file = folder / f"{part}-{first}.cpp"
            file.write_text("".join(f'#include "{HERE / name}"\n' for name in names[first : first + 5]))
            made.append(str(file.relative_to(HERE)))
    return [*made, *alone]


def nvcc_version(cuda_home: str | None) -> str | None:
    """Returns "13.0" of the compiler in this folder; None where there is none that runs."""
    if cuda_home is None:
        return None
    try:
        words = [os.path.join(cuda_home, "bin", "nvcc"), "--version"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else None


def main() -> None:
    """Builds."""
    try:
        import torch
        from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
    except ImportError:
        sys.exit(
            "fold3d: building needs torch in this environment. Install it first (pip install torch), then run\n"
            "    pip install --no-build-isolation .\n"
            "pip's isolated build environment cannot see the torch you use."
        )
    os.environ.setdefault("MAX_JOBS", "2")
    torch_cuda = torch.version.cuda
    nvcc = nvcc_version(CUDA_HOME) if torch_cuda else None
    files = (str(path.relative_to(HERE)) for path in (HERE / "csrc").rglob("*"))
    sources, why = chosen_sources(files, torch_cuda=torch_cuda, nvcc=nvcc)
    if {"bdist_wheel", "editable_wheel"} & set(sys.argv):  # as pip says; `build_ext` compiles again only what changed
        sources = joined(sources, HERE / "build" / "joined")
    # One rounding for each operation, as nvcc is told: the same bits on every CPU, whatever it can fuse.
    exact = ["-ffp-contract=off", "-fno-math-errno"]
    warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    flags = ["-std=c++20", "-O3", "-g0", *exact, "-fvisibility=hidden", *warnings]
    if why is None:
        flags.append(f'-DFOLD3D_CUDA_KERNELS="{nvcc}"')
    elif torch_cuda:
        sys.stderr.write(f"fold3d: building without CUDA kernels: {why}\n")
    # The extension runs with the torch it was built against, and the Trainer overrides methods of transformers that
    # every minor version may change: both are held to what was built with, and to what the tests ran.
    requirements = [
        f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*",
        "transformers>=5.23,<5.24",
        "accelerate>=1.15",
        "safetensors>=0.8",
        "greenlet>=3.5",
        "numpy",
    ]
    kind, compiled_with = CppExtension, {"cxx": flags}
    if why is None:
        kind, compiled_with = CUDAExtension, {"cxx": flags, "nvcc": ["-std=c++20", "-O3", "--fmad=false"]}
    extension = kind("fold3d._C", sources, include_dirs=[str(HERE / "csrc")], extra_compile_args=compiled_with)
    setup(install_requires=requirements, ext_modules=[extension], cmdclass={"build_ext": BuildExtension})


if __name__ == "__main__":
    main()
