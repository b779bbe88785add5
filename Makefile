# make train, make test: each makes its own environment in .venv first, from constraints.txt; offline once that is there.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
READY_TO_TEST := .venv/installed-dev
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
OUT ?= gpu-check

.PHONY: train test lint bench gpu-check clean

train: $(INSTALLED)                      ## train the default model and print a sample; options: make train ARGS="model=small"
	$(BIN)/python train.py $(ARGS)

test: lint                               ## everything that must be true
	$(BIN)/python -m pytest

lint: $(READY_TO_TEST)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY_TO_TEST)                  ## verify and time every kernel; rewrite the tables from what was measured
	$(BIN)/python -m kernels.bench timex --json benchmarks/results/timex-cpu.json
	$(BIN)/python -m kernels.bench wkv --json benchmarks/results/wkv-cpu.json
	$(BIN)/python -m kernels.tables

gpu-check:                               ## on a CUDA machine, with its own Python: conformance, benchmarks, short runs
	$(PYTHON) -m kernels.gpu_check $(OUT)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

$(READY_TO_TEST): $(INSTALLED)
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .hypothesis
