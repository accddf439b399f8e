# Every target does its own set-up: a virtual environment in .venv with the pinned versions of constraints.txt.
# What a machine must have: make and Python 3.10 or newer. PYTHON=/path/to/python3.12 chooses another interpreter.
# Each step of the set-up is one line with its time; VERBOSE=1 shows what the installer says.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STEP := @.ci/quietly

# The transformers that is kept working beside the pinned one: an environment over the first, in `make test-all` only.
OLDER := 5.17.0
OLDER_VENV := .venv-transformers-$(OLDER)
OLDER_TESTS := tests/ecosystem/accelerate tests/ecosystem/peft tests/ecosystem/transformers tests/zero/construction/test_transformers*.py

# One thread per process: ranks and test workers share the cores. Bytecode is kept whatever the environment says, because
# several hundred processes import the package, and without it each compiles it again.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# As many tests run at once as there are cores, and beside them those that mostly wait (tests/harness/waiting_tests.py).
# Each process keeps up to four ranks in memory. `make test AT_ONCE=1` runs one test after the other.
AT_ONCE = logical
PYTEST = $(TEST_ENV) $(BIN)/python -m pytest $(if $(filter-out 1,$(AT_ONCE)),-n $(AT_ONCE) --maxprocesses 5 --dist worksteal)

# All devices; without any, two ranks on the CPU. `make quickstart RANKS="--num_gpus 4"` chooses.
RANKS = $(shell $(BIN)/python -c 'import torch; print("" if torch.accelerator.is_available() else "--num_gpus 2")')

RAY_VENV := .venv-ray

.PHONY: help quickstart generate test default-tests test-all test-older-transformers test-ray test-matrix lint style types \
  check-tree docs docs-version docs-check wheel release-check check-release-tag install clean

help:
	@echo "make quickstart   train a small language model with ZeRO stage 3 on this machine"
	@echo "make generate     let the quickstart's model write, with weights of 32, 16, 8 and 4 bits"
	@echo "make test         lint, type check and the default tests"
	@echo "make test-all     the same with the slow tests, and the Hugging Face tests with transformers $(OLDER) too"
	@echo "make test-ray     Ray Train with two and three workers on this machine (some minutes; installs ray[train])"
	@echo "make test-matrix  the fast part of the tests with other versions of Python, torch and the libraries on top"
	@echo "make lint         ruff and mypy only"
	@echo "make check-tree   imports between layers, and what may lie in the tree"
	@echo "make docs         the documentation as a site in site/ (SERVE=1 shows it while you write)"
	@echo "make docs-version the site as one version more in the branch gh-pages, with a menu of versions"
	@echo "make docs-check   documents against the code they describe"
	@echo "make wheel        a wheel and a source distribution in dist/, the same bytes from the same commit"
	@echo "make release-check  both installed into clean environments and used there (some minutes)"
	@echo "make install      the development environment in $(VENV)"

quickstart: $(VENV)/.for-quickstart
	$(BIN)/deepspeed $(RANKS) examples/quickstart/train.py

generate: $(VENV)/.for-quickstart
	$(BIN)/python examples/quickstart/generate.py

# mypy takes a core for a minute where it has no cache, so it runs beside the tests.
test: style
	@$(MAKE) --no-print-directory -j 2 LATER=--later types default-tests

default-tests: $(VENV)/.for-tests
	$(PYTEST)

test-all: lint
	$(TEST_ENV) HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -m ""
	@$(MAKE) --no-print-directory test-older-transformers

test-older-transformers: $(VENV)/.for-tests
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  $(MAKE) --no-print-directory $(OLDER_VENV)/.ready && \
	  $(TEST_ENV) $(OLDER_VENV)/bin/python -m pytest $(OLDER_TESTS); \
	else echo "left out: tests with transformers $(OLDER), which need Python 3.11"; fi

test-ray: $(RAY_VENV)/.ready
	$(TEST_ENV) DS_ACCELERATOR=cpu $(RAY_VENV)/bin/python -m pytest -m "" tests/ecosystem/ray

# Environments in .matrix, one per combination of versions; a run that was interrupted goes on (see .ci/matrix.py).
test-matrix:
	@$(PYTHON) .ci/matrix.py $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again) $(if $(TESTS),--tests "$(TESTS)")

lint: $(VENV)/.for-tests
	@$(MAKE) --no-print-directory style types

style: $(VENV)/.for-tests
	$(STEP) "ruff check" $(BIN)/ruff check .
	$(STEP) "ruff format --check" $(BIN)/ruff format --check .

types: $(VENV)/.for-tests
	$(STEP) $(LATER) "mypy" $(BIN)/mypy

check-tree: $(VENV)/.for-tests
	@$(TEST_ENV) .ci/quietly "layers and files" $(BIN)/python -m pytest -q tests/project/test_imports.py tests/project/test_tree.py

docs: $(VENV)/.for-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve,build --strict)

# Into the local branch gh-pages, beside the versions that it has; nothing is pushed.
docs-version: $(VENV)/.for-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mike deploy --update-aliases \
	  $$(sed -n 's/^RELEASE = "\([0-9]*\.[0-9]*\).*/\1/p' deepspeed/release.py) latest

docs-check: $(VENV)/.for-tests
	$(TEST_ENV) $(BIN)/python -m pytest -m docs

# hatchling sets owners, modes and order of files; all times are that of the commit.
wheel: $(VENV)/.for-wheel
	@rm -rf dist
	$(STEP) "building dist/" env SOURCE_DATE_EPOCH=$(shell git log -1 --format=%ct 2>/dev/null || echo 1577836800) \
	  $(BIN)/python -m hatchling build -t sdist -t wheel -d dist
	@ls dist

release-check: wheel
	@$(BIN)/python .ci/release_check.py

# The rules of a release (docs/reference/public-api.md): the tag is the version, which CHANGELOG.md dates.
check-release-tag:
	@grep -qx 'RELEASE = "$(TAG:v%=%)"' deepspeed/release.py && grep -q '^## $(TAG:v%=%) (20' CHANGELOG.md && \
	  test -e tests/surface/public-$(TAG:v%=%).txt || { \
	  echo "tag $(TAG): expected RELEASE of deepspeed/release.py, a dated section of CHANGELOG.md and" \
	    "tests/surface/public-$(TAG:v%=%).txt of this version; tag the commit that has all three"; exit 1; }

install: $(VENV)/.for-tests

# The stamps are written last, so an interrupted installation is repeated; a change of versions repeats it too.
$(VENV)/.for-tests: pyproject.toml constraints.txt $(VENV)/.created
	$(STEP) "installing what the tests need into $(VENV)" $(PIP) install -c constraints.txt -e ".[test]"
	@touch $@ $(VENV)/.for-quickstart $(VENV)/.for-docs

$(VENV)/.for-docs: pyproject.toml constraints.txt $(VENV)/.created
	$(STEP) "installing what the documentation needs into $(VENV)" $(PIP) install -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.for-quickstart: pyproject.toml constraints.txt $(VENV)/.created
	$(STEP) "installing what the quickstart needs into $(VENV)" $(PIP) install -c constraints.txt -e ".[plots]"
	@touch $@

$(VENV)/.for-wheel: constraints.txt $(VENV)/.created
	$(STEP) "installing hatchling into $(VENV)" $(PIP) install -c constraints.txt hatchling
	@touch $@

# Finds everything in the first environment except what is installed again here: transformers and what it needs changed.
$(OLDER_VENV)/.ready: $(VENV)/.for-tests
	@$(BIN)/python -m venv --clear $(OLDER_VENV)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
	  > $$($(OLDER_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first_environment.pth
	@grep -v '^transformers==' constraints.txt > $(OLDER_VENV)/constraints.txt
	$(STEP) "installing transformers $(OLDER) into $(OLDER_VENV)" $(OLDER_VENV)/bin/python -m pip \
	  --disable-pip-version-check install -c $(OLDER_VENV)/constraints.txt "transformers==$(OLDER)"
	@touch $@

# Finds everything in the first environment except Ray and what only Ray needs.
$(RAY_VENV)/.ready: $(VENV)/.for-tests
	@$(BIN)/python -m venv --clear $(RAY_VENV)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
	  > $$($(RAY_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first_environment.pth
	$(STEP) "installing ray[train] into $(RAY_VENV)" $(RAY_VENV)/bin/python -m pip --disable-pip-version-check install "ray[train]"
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed and $(PYTHON) is older or missing: install it, or name one with 'make PYTHON=...'."; exit 1; }
	$(STEP) "creating $(VENV)" sh -c '$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version' || { \
	  echo "$(PYTHON) cannot create a virtual environment: install its venv and ensurepip modules (on Debian and Ubuntu: apt install python3-venv)."; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(OLDER_VENV) $(RAY_VENV) build dist site *.egg-info
	find deepspeed tests benchmarks examples docs -name __pycache__ -prune -exec rm -rf {} +
