PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo fast test bench lint check clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv and install tag2box into it, at the versions in constraints.txt

# torch is installed first, alone: it is by far the largest download, and a failure should name it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11: make setup PYTHON=/path/to/a/newer/python"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## train and evaluate on generated scenes; writes the report to runs/demo
	$(BIN)/tag2box demo --out runs/demo

fast: setup ## run the unit tests: under a minute on two cores
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test: setup ## run all tests
	$(BIN)/pytest -n 2 --dist loadfile

bench: setup ## measure speed and memory; hours, resumable (a trial: .venv/bin/python benchmarks/run.py --small)
	$(BIN)/python benchmarks/run.py

lint: setup ## style and formatting
	$(BIN)/ruff check --no-cache
	$(BIN)/ruff format --check

check: lint ## lint, types, direction of imports, house rules and words
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py
	$(BIN)/python tools/words.py

clean: ## remove caches and build output; .venv and runs stay
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
