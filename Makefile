# Two commands set everything up: `make demo` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Pinned, so that every machine tests the same torch. On Linux the public index serves the CUDA build;
# for the CPU wheel: make test TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
TORCH  ?= torch==2.13.0

# What runs by itself; the others are what these measure with.
BENCHES := $(filter-out bench/about.py bench/deepseek_v3_layout.py bench/gpt.py,$(wildcard bench/*.py))

.PHONY: help demo test test-all check bench docs env clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then train a small mixture of experts on two processes"
	@echo "make test    set up, check style and types, then run the tests"
	@echo "make check   style and types only"
	@echo "make bench   the benchmarks, each beside its alternatives"
	@echo "make docs    write the generated pages, and the output of commands on the others"

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(TORCH_INDEX)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

# Text that is on every machine: the sources of Python's standard library.
demo: env
	@$(BIN)/zerodrift train examples/jobs/demo.yaml --nproc 2 \
		--set "data.train=$$($(BIN)/python -c 'import os; print(os.path.dirname(os.__file__))')/*.py"
	@echo; echo 'What it makes of "def ":'
	@$(BIN)/zerodrift sample runs/demo --prompt 'def '
	@echo; echo 'The report: runs/demo/report.html'

test: check
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu"

test-all: check
	$(BIN)/python -m pytest -q

check: env
	$(BIN)/ruff check src tests bench docs examples
	$(BIN)/ruff format --check src tests bench docs examples
	$(BIN)/mypy

bench: env
	@for script in $(BENCHES); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: env
	$(BIN)/python docs/refresh.py

clean:
	rm -rf $(VENV) build dist runs src/*.egg-info
