"""Builds the simulated device: `python -m simdevice.build`, as `make` does before the tests.

Three translation units, compiled side by side, because torch's headers cost more than all the code here: one of the
torch-free core, one of what stands on torch, one of the operators. What has not changed is not compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "build" / "simdevice"
LIBRARY = OUT / "_simdevice.so"
UNITS = {"core": ["core"], "device": ["device", "bindings", "c10d"], "operators": ["operators"]}
"""Which folders are compiled together."""
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unused-parameter"]


def build() -> Path:
    """Returns the library, built if its sources, torch or the flags have changed. Raises CalledProcessError.

    Of several processes one builds, and the others wait for it.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_alone()


def _build_alone() -> Path:
    stamp, want = OUT / "stamp", _fingerprint()
    if LIBRARY.exists() and stamp.exists() and stamp.read_text() == want:
        return LIBRARY
    with ThreadPoolExecutor(min(len(UNITS), os.cpu_count() or 1)) as pool:
        objects = list(pool.map(_compile, sorted(UNITS)))
    lib = Path(torch.__file__).parent / "lib"
    libraries = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    new = LIBRARY.with_suffix(f".{os.getpid()}")
    subprocess.run(
        ["g++", "-shared", "-o", new, *objects, f"-L{lib}", f"-Wl,-rpath,{lib}", *libraries], check=True, timeout=600
    )
    new.replace(LIBRARY)
    stamp.write_text(want)
    return LIBRARY


def _compile(unit: str) -> Path:
    from torch.utils import cpp_extension  # imports setuptools; every process comes here, and few compile

    sources = [path for folder in UNITS[unit] for path in sorted((HERE / folder).glob("*.cpp"))]
    whole = OUT / f"{unit}.cpp"
    text = "".join(f'#include "simdevice/{path.relative_to(HERE)}"\n' for path in sources)
    if not whole.exists() or whole.read_text() != text:
        whole.write_text(text)
    target = OUT / f"{unit}.o"
    includes = [f"-I{HERE.parent}", f"-isystem{sysconfig.get_paths()['include']}"]
    includes += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    compiler = ["ccache", "g++"] if shutil.which("ccache") else ["g++"]
    subprocess.run(
        [
            *compiler,
            *FLAGS,
            "-DTORCH_EXTENSION_NAME=_simdevice",
            "-DUSE_DISTRIBUTED",
            "-DUSE_C10D_GLOO",
            *includes,
            "-c",
            whole,
            "-o",
            target,
        ],
        check=True,
        timeout=600,
    )
    return target


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS} {UNITS}".encode())
    for path in sorted(path for folders in UNITS.values() for folder in folders for path in (HERE / folder).iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(str(path.relative_to(HERE)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    build()
