# Every target does its own set-up: a virtual environment in .venv with the pinned versions of constraints.txt.
# What a machine must have: make and Python 3.10 or newer. PYTHON=/path/to/python3.12 chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread per process: ranks and test workers share the cores.
TEST_ENV := OMP_NUM_THREADS=1

# All devices; without any, two ranks on the CPU. `make quickstart RANKS="--num_gpus 4"` chooses.
RANKS = $(shell $(BIN)/python -c 'import torch; print("" if torch.accelerator.is_available() else "--num_gpus 2")')

.PHONY: help quickstart test test-all lint docs docs-check install clean

help:
	@echo "make quickstart   train a small language model with ZeRO stage 3 on this machine"
	@echo "make test         lint, type check and the default tests"
	@echo "make test-all     the same with the slow tests"
	@echo "make lint         ruff and mypy only"
	@echo "make docs         the documentation as a site in site/ (SERVE=1 shows it while you write)"
	@echo "make docs-check   documents against the code they describe"
	@echo "make install      the development environment in $(VENV)"

quickstart: $(VENV)/.for-quickstart
	$(BIN)/deepspeed $(RANKS) examples/quickstart/train.py

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest

test-all: lint
	$(TEST_ENV) $(BIN)/python -m pytest -m ""

lint: $(VENV)/.for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.for-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve,build --strict)

docs-check: $(VENV)/.for-tests
	$(TEST_ENV) $(BIN)/python -m pytest -m docs

install: $(VENV)/.for-tests

# The stamps are written last, so an interrupted installation is repeated; a change of versions repeats it too.
$(VENV)/.for-tests: pyproject.toml constraints.txt $(VENV)/.created
	$(PIP) install -c constraints.txt -e ".[test]"
	@touch $@ $(VENV)/.for-quickstart $(VENV)/.for-docs

$(VENV)/.for-docs: pyproject.toml constraints.txt $(VENV)/.created
	$(PIP) install -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.for-quickstart: pyproject.toml constraints.txt $(VENV)/.created
	$(PIP) install -c constraints.txt -e ".[plots]"
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed and $(PYTHON) is older or missing: install it, or name one with 'make PYTHON=...'."; exit 1; }
	@$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version >/dev/null || { \
	  echo "$(PYTHON) cannot create a virtual environment: install its venv and ensurepip modules (on Debian and Ubuntu: apt install python3-venv)."; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
