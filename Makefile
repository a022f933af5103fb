# From a bare clone: `make demo` trains a small GPT-2 on four processes, `make test` runs what every change must pass.
# Both prepare what they need first: system packages, .venv with the pinned requirements, the C++ extension.

PYTHON ?= python3
PY := .venv/bin/python
ROOT := $(CURDIR)
OUT ?= out/demo
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_ROOT_USER_ACTION = ignore
# Many containers forbid Python to keep what it compiles. Hundreds of processes of the tests would all compile fold3d.
export PYTHONDONTWRITEBYTECODE =

include scripts/ccache.mk

CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu')
SIMDEVICE := $(shell find simdevice -name '*.cpp' -o -name '*.h')
TORCH := $(shell grep '^torch==' requirements.txt)
LINT := tests/test_quality.py tests/test_layering.py

FULL := cpp one-process parity dist faults trainer tools zoo zoo-tp-half1 zoo-tp-half2
PARITY := $(wildcard tests/dist/test_parity*.py)
# One more than the two cores that this is meant for: tests of several processes mostly wait.
WORKERS ?= 3
PYTEST = $(PY) -m pytest -q --numprocesses $(WORKERS) --dist worksteal --durations 40 --durations-min 1 $(PYTEST_MORE)
# $(call timed,WHAT,COMMAND) runs the command and says how long it took.
timed = @start=$$(date +%s); $(2); status=$$?; echo "$(1): $$(($$(date +%s) - start)) s"; exit $$status

GPU_TESTS := tests/dist/test_cuda.py tests/dist/test_kernels.py tests/kernels

.PHONY: all demo demo-network docs test test-cpp test-python asan-binary test-full $(FULL:%=test-full-%) mutations gpu lint wheel format clean distclean
.DELETE_ON_ERROR:

all: .venv/.extension

demo: .venv/.extension
	OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc-per-node 4 examples/pretrain_gpt.py \
	    --dp 2 --pp 2 --weights random --gradient_accumulation_steps 8 --timeline 50 --output_dir $(OUT)

# Three systems on a network limited on this machine, in about two minutes; needs root, and says so.
demo-network: .venv/.extension
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.cluster.demo --out out/demo-network

# The gate: the same tests for every commit, and all that CI runs. pip keeps one core busy; the other compiles meanwhile.
test: .venv/.system
	@$(MAKE) --no-print-directory -j2 .venv/.extension asan-binary
	@$(MAKE) --no-print-directory test-cpp test-python

# ThreadSanitizer only where C++ with threads changed since it passed (tests/cpp/tsan.passed).
test-cpp: .venv/.system
	$(call timed,C++ tests,$(MAKE) --no-print-directory -C tests/cpp asan tsan-if-changed)

asan-binary: .venv/.system
	@$(MAKE) --no-print-directory -C tests/cpp asan-binary

# Lint, types and layering are among them.
test-python: .venv/.extension
	$(call timed,Python tests,$(PYTEST) tests -m "not full")

# Everything, in parts: the gate's tests, the whole parity grids, ThreadSanitizer, more processes that die or stop, the
# simulated device, the zoo, the benchmarks' own tests. `make test-full-parity` runs one part.
test-full: $(FULL:%=test-full-%)

test-full-cpp: .venv/.system
	$(call timed,$@,$(MAKE) --no-print-directory -C tests/cpp asan tsan)

test-full-one-process: .venv/.extension
	$(call timed,$@,$(PYTEST) tests -m "not dist")

test-full-parity: .venv/.extension
	$(call timed,$@,$(PYTEST) tests/parity $(PARITY) -m dist)

test-full-dist: .venv/.extension
	$(call timed,$@,$(PYTEST) tests -m dist --ignore tests/trainer --ignore tests/faults --ignore tests/parity \
	    $(PARITY:%=--ignore %))

test-full-faults: .venv/.extension
	$(call timed,$@,$(PYTEST) tests/faults -m dist)

test-full-trainer: .venv/.extension
	$(call timed,$@,$(PYTEST) tests/trainer -m dist)

test-full-tools: .venv/.extension .venv/.simdevice
	$(call timed,$@,$(PYTEST) simdevice benchmarks && FOLD3D_TEST_DEVICE=sim $(PYTEST) tests/parity/test_training.py)

# Every class of transformers with a loss: in chunks, and with tp=2; that in two halves, of up to an hour each.
test-full-zoo: .venv/.extension
	$(call timed,$@,$(PYTEST) zoo --ignore zoo/test_shards.py)

test-full-zoo-tp-half1: .venv/.extension
	$(call timed,$@,$(PYTEST) zoo/test_shards.py -k "not half2")

test-full-zoo-tp-half2: .venv/.extension
	$(call timed,$@,$(PYTEST) zoo/test_shards.py -k half2)

# What the gate is worth: 30 single faults, each against the gate until its first failure. Without the test of the faults
# themselves, which would find each. Hours.
mutations: .venv/.extension asan-binary
	$(PY) -m tests.mutations --run "$(MAKE) --no-print-directory test PYTEST_MORE='--exitfirst --ignore tests/mutations'" --table out/mutations.md

# On a machine with GPUs, better two: tests that need them, speeds of links, and benchmarks, as text to paste.
gpu: .venv/.requirements
	@$(PY) -m benchmarks.gpu --look
	$(MAKE) .venv/.extension
	FOLD3D_REQUIRE_CUDA=1 $(PY) -m pytest -q $(GPU_TESTS)
	.venv/bin/torchrun --standalone --nproc-per-node gpu -m fold3d doctor
	$(PY) -m benchmarks.gpu --out out/gpu.json

lint: .venv/.extension
	$(PY) -m pytest -q $(LINT) --numprocesses auto

# A wheel for this Python whose version names torch and CUDA, such as 0.1.0+pt213cpu: out/wheels.
TAG = $(shell $(PY) -c 'import torch; cuda = torch.version.cuda; print("pt" + "".join(torch.__version__.split(".")[:2]) + \
    ("cu" + cuda.replace(".", "") if cuda else "cpu"))')

wheel: .venv/.extension
	$(PY) setup.py --quiet egg_info --egg-base build --tag-build +$(TAG) bdist_wheel --dist-dir out/wheels
	@ls out/wheels/fold3d-*+$(TAG)-*.whl

docs: .venv/.extension
	.venv/bin/sphinx-build --quiet --fail-on-warning --keep-going -b html -d out/doctrees docs out/docs
	@echo "out/docs/index.html"

format: .venv/.requirements
	.venv/bin/ruff check --fix-only --quiet .
	.venv/bin/ruff format .
	find csrc tests/cpp simdevice -name '*.cpp' -o -name '*.h' -o -name '*.cu' | xargs .venv/bin/clang-format -i

clean:
	rm -rf build out *.egg-info __pycache__ fold3d/_C*.so .venv/.extension .venv/.simdevice .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find fold3d tests zoo simdevice examples benchmarks docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	if [ -e tests/cpp/Makefile ]; then $(MAKE) -C tests/cpp clean; fi

distclean: clean
	rm -rf .venv

# The stamps below live in .venv, so that removing it undoes them all.

.venv/.system: scripts/system_packages.sh
	sh scripts/system_packages.sh $(PYTHON)
	mkdir -p .venv && touch $@

.venv/.created: | .venv/.system
	$(PYTHON) -m venv .venv
	touch $@

# torch alone and first: it decides the versions of what it shares with the others, and the extension needs it.
.venv/.torch: requirements.txt | .venv/.created
	@echo "installing $(TORCH) (some hundred MB)"
	$(PY) -m pip install --quiet $(TORCH)
	touch $@

.venv/.requirements: requirements.txt .venv/.torch
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

# The first build is pip's, which also installs the `fold3d` command and compiles several files as one. The next one
# compiles each by itself, later ones only what changed.
.venv/.extension: setup.py $(CSRC) .venv/.requirements
	@if [ -e .venv/.installed ]; then \
	    $(PY) setup.py --quiet build_ext --inplace; \
	else \
	    echo "building the extension (minutes on two cores)"; \
	    $(PY) -m pip install --quiet --no-build-isolation --no-deps --editable . && touch .venv/.installed; \
	fi
	touch $@

# The accelerator of the tests (simdevice/), of torch's headers and little else.
.venv/.simdevice: simdevice/build.py $(SIMDEVICE) .venv/.requirements
	@echo "building the simulated device of the tests (about a minute)"
	$(PY) -m simdevice.build
	touch $@
