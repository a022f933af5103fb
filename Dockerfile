# fold3d with the versions that the tests run with (docs/containers.md). For CPUs:
#     docker build -t fold3d .
# For GPUs, whose libraries come with torch; the host has NVIDIA's driver and container toolkit:
#     docker build -t fold3d --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# The same with fold3d's own CUDA kernels, which nvcc compiles:
#     docker build -t fold3d --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 \
#         --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .
# BASE is a Debian or Ubuntu with Python 3.11 or newer.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# No GPU is there while an image is built, so torch cannot look at one for its architecture.
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0"
ARG MAX_JOBS=2
ENV PATH=/opt/fold3d/bin:$PATH NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The compiler stays: torch.compile needs it.
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ openssh-client python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /opt/fold3d-source
COPY requirements.txt ./
RUN python3 -m venv /opt/fold3d && \
    pip install --no-cache-dir --index-url "${TORCH_INDEX}" "$(grep '^torch==' requirements.txt)"

COPY CHANGELOG.md LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY csrc csrc
COPY fold3d fold3d
RUN pip install --no-cache-dir --constraint requirements.txt setuptools wheel ninja && \
    pip install --no-cache-dir --constraint requirements.txt --no-build-isolation ".[cluster,draw,trl]" && \
    rm -rf build ./*.egg-info

WORKDIR /workspace
RUN fold3d --version
CMD ["fold3d", "doctor"]
