PYTHON ?= python3
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := .venv/$(SCRIPTS)
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup lock demo fast test test-cluster coverage test-minimum fuzz mutants bench bench-check docs lint check release-check release clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv and install tag2box into it, at the versions and hashes in requirements.lock

# PIP verifies the SHA-256 of every file, builds no package from source, and installs nothing that is not listed.
# torch comes first: it is by far the largest download, and a failure should name it. On Linux, torch of PyPI needs the
# CUDA libraries; its build without them (2.13.0+cpu) is preferred where pip is configured to find it.
PIP := $(BIN)/pip install --quiet --require-hashes --only-binary :all:

$(READY): pyproject.toml $(wildcard requirements*.lock)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: make setup PYTHON=/path/to/a/newer/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) --no-deps -r requirements-cpu.lock 2>/dev/null || $(PIP) --no-deps -r requirements-torch.lock
	$(PIP) -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/pip check
	@touch $@

lock: ## write the lock files again, after a change of pyproject.toml or constraints.txt
	$(PYTHON) tools/lock.py

demo: setup ## train and evaluate on generated scenes; writes the report to runs/demo
	$(BIN)/tag2box demo --out runs/demo

fast: setup ## run the unit tests, with a fifth of the examples of property tests
	HYPOTHESIS_PROFILE=quick $(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test: setup ## run all tests but those on a Ray cluster
	$(BIN)/pytest -n 2 --dist loadfile -m "not cluster"

test-cluster: setup ## run the tests on a local Ray cluster, some nodes and processes of which are killed
	$(BIN)/pytest -m cluster

coverage: setup ## run all tests and print which lines of the package they reach
	$(BIN)/pytest -n 2 --dist loadfile --cov --cov-report=term

# The oldest versions that pyproject.toml allows, in an environment of its own. TORCH replaces that of torch, where the
# oldest one has no build: make test-minimum TORCH=2.13.0
MINIMUM := .venv-minimum
TORCH ?=

test-minimum: ## run the unit tests with the oldest versions of all dependencies
	$(PYTHON) -m venv $(MINIMUM)
	$(PYTHON) tools/lock.py --minimum > $(MINIMUM)/constraints.txt
	$(if $(TORCH),sed -i.bak 's/^torch==.*/torch==$(TORCH)/' $(MINIMUM)/constraints.txt)
	$(MINIMUM)/$(SCRIPTS)/pip install --quiet -c $(MINIMUM)/constraints.txt -e '.[dev]'
	$(MINIMUM)/$(SCRIPTS)/pytest -n 2 --dist loadfile -m "not slow"

fuzz: setup ## new examples for the property tests, then every command on 5,000 mutated inputs: about 30 minutes
	HYPOTHESIS_PROFILE=explore $(BIN)/pytest -n 2 --dist loadfile -m "not slow"
	$(BIN)/python tools/fuzz.py --write

mutants: setup ## test mutants of ops, methods, metrics and storage; hours, resumable (a sample: tools/mutants.py --count 60)
	$(BIN)/python tools/mutants.py

bench: setup ## measure speed and memory; hours, resumable (a trial: .venv/bin/python benchmarks/run.py --small)
	$(BIN)/python benchmarks/run.py

bench-check: setup ## compare the ratios of docs/results with this code and machine: some minutes
	$(BIN)/python benchmarks/bench_check.py

# Warnings are errors, and nothing is fetched from the web.
docs: setup ## build the documentation site, without a network: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup ## style and formatting
	$(BIN)/ruff check --no-cache
	$(BIN)/ruff format --check

check: lint ## lint, types, direction of imports, house rules and words
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py
	$(BIN)/python tools/words.py

release-check: setup ## build wheel and sdist, install the wheel into a new environment, run the small demo from it
	$(BIN)/python tools/release.py check --demo

release: setup ## release-check, then tag the commit with the version; nothing is pushed
	$(BIN)/python tools/release.py tag

clean: ## remove caches and build output; .venv and runs stay
	rm -rf build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
