# Two commands set everything up: `make demo` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Pinned, so that every machine tests the same torch. Another one: make test TORCH=torch==2.15.0. On Linux the
# public index serves the CUDA build; for the CPU wheel:
# make test TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu"
TORCH  ?= $(shell grep '^torch==' requirements/torch.txt)
# Where `make versions` makes its environments, of several GB each.
CELLS  ?= $(VENV)-versions

# Images of Python often set it. Tests start hundreds of processes, which would each compile all of zerodrift.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo quick test test-all style check bench gpu wheel lock newest peers versions doors docs site env clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then train a small mixture of experts on two processes"
	@echo "make quick   the tests to run after every change: units, and a cell of each product of the numeric core"
	@echo "make test    set up, check style and types, then run the tests"
	@echo "make check   style and types only"
	@echo "make bench   the benchmarks as they were run, and the page of what they find; hours"
	@echo "make gpu     on a machine with GPUs: their tests, then their benchmarks; 20 minutes at most"
	@echo "make wheel   a wheel with the CPU kernels in it, tried where there is neither a compiler nor the repository"
	@echo "make lock    pin the newest of every package in requirements/; DRY=1 only says what would change"
	@echo "make newest  the quick tests and those of models with the newest of every package, pinned or not"
	@echo "make peers   the tests beside DeepSpeed, Lightning, TRL, verl and wandb, which make test skips"
	@echo "make versions   the tests with other versions of Python, torch, transformers and DeepSpeed; hours"
	@echo "make doors   other people's trainers on zerodrift and on DeepSpeed, each in an environment of its own; hours"
	@echo "make docs    write the generated pages, and the output of commands on the others"
	@echo "make site    the pages as a website in site/, which works from disk; every link is checked"

env: $(VENV)/.ready

# What the environment is made from. It is made anew when that changes, and when it was not made to its end.
MADE_FROM := requirements/lock.txt requirements/torch.txt pyproject.toml setup.py
WHICH := $(shell $(PYTHON) -V 2>/dev/null || echo not there)
ASKED := $(strip $(WHICH) $(TORCH) $(TORCH_INDEX) $(shell cat $(MADE_FROM) | cksum))
ifneq ($(strip $(shell $(BIN)/python -V >/dev/null 2>&1 && cat $(VENV)/.ready 2>/dev/null)),$(ASKED))
.PHONY: $(VENV)/.ready
endif

$(VENV)/.ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 10))' 2>/dev/null || { \
	echo 'zerodrift needs Python 3.10 to 3.13; `$(PYTHON)` is: $(WHICH)'; \
	echo 'Name another one: make $(MAKECMDGOALS) PYTHON=python3.12'; exit 1; }
	@$(PYTHON) tools/environment.py $(VENV) --torch "$(TORCH)" --index="$(TORCH_INDEX)"
	@echo '$(ASKED)' > $@

# Text that is on every machine: the sources of Python's standard library.
demo: env
	@$(BIN)/zerodrift train examples/jobs/demo.yaml --nproc 2 \
		--set "data.train=$$($(BIN)/python -c 'import os; print(os.path.dirname(os.__file__))')/*.py"
	@echo; echo 'What it makes of "def ":'
	@$(BIN)/zerodrift sample runs/demo --prompt 'def '
	@echo; echo 'Next: . $(BIN)/activate; zerodrift'

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
	$(BIN)/ruff check src tests bench tools examples setup.py
	$(BIN)/ruff format --check src tests bench tools examples setup.py

check: style
	$(BIN)/mypy

wheel: env
	@rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m pytest -q -n 0 tests/e2e/test_wheel.py --wheel "$$(ls dist/*.whl)"

lock:
	$(PYTHON) tools/lock.py "$(TORCH)" $(if $(UNTIL),--until $(UNTIL)) $(if $(DRY),--dry)

newest: env
	$(BIN)/python tools/matrix.py newest $(VENV)-newest --torch="$(TORCH_INDEX)"

peers: style
	$(PYTHON) tools/environment.py $(VENV)-peers --torch "$(TORCH)" --index="$(TORCH_INDEX)" --extra peers
	PATH="$(abspath $(VENV)-peers)/bin:$$PATH" $(VENV)-peers/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu"

bench: env
	$(BIN)/python bench/again.py

gpu: env
	$(BIN)/python bench/gpu.py

docs: env
	$(BIN)/python tools/refresh.py

site: env
	$(BIN)/python tools/website.py site

versions: env
	$(BIN)/python tools/matrix.py all $(CELLS) --torch="$(TORCH_INDEX)"

doors: env
	$(BIN)/python tools/doors.py all $(VENV)-doors --torch="$(TORCH_INDEX)"

clean:
	rm -rf $(VENV) $(VENV)-doors $(VENV)-newest $(VENV)-peers build dist runs src/*.egg-info
