# Two commands set everything up: `make demo` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Pinned, so that every machine tests the same torch. Another one: make test TORCH=torch==2.15.0. On Linux the
# public index serves the CUDA build; for the CPU wheel:
# make test TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
TORCH  ?= torch==2.13.0
# Where `make versions` makes its environments, of several GB each.
CELLS  ?= $(VENV)-versions

# Images of Python often set it. Tests start hundreds of processes, which would each compile all of zerodrift.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo quick test test-all style check bench gpu docs versions doors env clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then train a small mixture of experts on two processes"
	@echo "make quick   the tests to run after every change: units, and a cell of each product of the numeric core"
	@echo "make test    set up, check style and types, then run the tests"
	@echo "make check   style and types only"
	@echo "make bench   the benchmarks as they were run, and the page of what they find; hours"
	@echo "make gpu     on a machine with NVIDIA GPUs: their tests, then their benchmarks; 20 minutes at most"
	@echo "make versions   the tests with other versions of Python, torch, transformers and DeepSpeed; hours"
	@echo "make doors   other people's trainers on zerodrift and on DeepSpeed, each in an environment of its own; hours"
	@echo "make docs    write the generated pages, and the output of commands on the others"

env: $(VENV)/.ready

# The environment was made for this; what is asked for with another PYTHON or TORCH is not what is there.
ASKED := $(strip $(shell $(PYTHON) -V 2>&1) $(TORCH) $(TORCH_INDEX))
ifneq ($(strip $(shell cat $(VENV)/.ready 2>/dev/null)),$(ASKED))
.PHONY: $(VENV)/.ready
endif

$(VENV)/.ready: pyproject.toml
	@rm -f $@
	$(PYTHON) -m venv $$([ "$$($(BIN)/python -V 2>&1)" = "$$($(PYTHON) -V 2>&1)" ] || echo --clear) $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(TORCH_INDEX)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@echo '$(ASKED)' > $@

# Text that is on every machine: the sources of Python's standard library.
demo: env
	@$(BIN)/zerodrift train examples/jobs/demo.yaml --nproc 2 \
		--set "data.train=$$($(BIN)/python -c 'import os; print(os.path.dirname(os.__file__))')/*.py"
	@echo; echo 'What it makes of "def ":'
	@$(BIN)/zerodrift sample runs/demo --prompt 'def '
	@echo; echo 'The report: runs/demo/report.html'

quick: env
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m quick

# Types are checked beside the tests, whose ranks wait for each other now and then.
test: style
	@$(BIN)/mypy > $(VENV)/.types 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu"; tests=$$?; \
	wait $$types || { cat $(VENV)/.types; exit 1; }; exit $$tests

test-all: check
	$(BIN)/python -m pytest -q

style: env
	$(BIN)/ruff check src tests bench docs examples
	$(BIN)/ruff format --check src tests bench docs examples

check: style
	$(BIN)/mypy

bench: env
	$(BIN)/python bench/again.py

gpu: env
	$(BIN)/python bench/gpu.py

docs: env
	$(BIN)/python docs/refresh.py

versions: env
	$(BIN)/python docs/matrix.py all $(CELLS) --torch="$(TORCH_INDEX)"

doors: env
	$(BIN)/python docs/doors.py all $(VENV)-doors --torch="$(TORCH_INDEX)"

clean:
	rm -rf $(VENV) $(VENV)-doors build dist runs src/*.egg-info
