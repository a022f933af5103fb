"""Builds fold3d._C, the C++ extension. Run by pip with --no-build-isolation, because it needs the installed torch."""

import glob
import os
import sys

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    sys.exit(
        "fold3d: building needs torch in this environment. Install it first (pip install torch), then run\n"
        "    pip install --no-build-isolation .\n"
        "pip's isolated build environment cannot see the torch you use."
    )

here = os.path.dirname(os.path.abspath(__file__))
sources = sorted(
    os.path.relpath(path, here) for path in glob.glob(os.path.join(here, "csrc", "**", "*.cpp"), recursive=True)
)
# The extension runs with the torch it was built against, and the Trainer overrides methods of transformers that every
# minor version may change: both are held to what was built with, and to what the tests ran.
requirements = [
    f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*",
    "transformers>=5.23,<5.24",
    "accelerate>=1.15",
    "safetensors>=0.8",
    "greenlet>=3.5",
    "numpy",
]
flags = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]
os.environ.setdefault("MAX_JOBS", "2")

# CUDA is reached through c10's device-generic streams and events, so one set of sources serves CPU and CUDA torch.
setup(
    install_requires=requirements,
    ext_modules=[
        CppExtension(
            "fold3d._C",
            sources,
            include_dirs=[os.path.join(here, "csrc")],
            extra_compile_args={"cxx": flags},
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
