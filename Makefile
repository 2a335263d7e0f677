# Two commands on a fresh machine: `make run` trains the default job on a CPU, `make test` passes the tests.
# Both set up .venv first. torch is installed before everything else, so that the pinned build is the one that stays.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?= recipes/arithmetic.toml
NAME := $(basename $(notdir $(RECIPE)))
RUN_DIR ?= runs/$(NAME)-$(shell date +%Y%m%d-%H%M%S)
STAMP := $(VENV)/.installed

.PHONY: help setup run test soak simulate check format bench clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP) ## Make .venv with everything that run, test and check need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ratchet needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

run: setup ## Train the default job (RECIPE=recipes/copy.toml for another one)
	$(BIN)/ratchet run $(RECIPE) --dir $(RUN_DIR)

test: setup ## Run the tests
	$(BIN)/python -m pytest

soak: setup ## The long tests that `test` leaves out
	$(BIN)/python -m pytest -m soak

simulate: setup ## Ten minutes of fresh random worlds on two cores
	$(BIN)/python -m tests.simulation --seconds 600 --jobs 2

check: setup ## Format, lint, types and layers, as CI does
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## Format and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: setup ## Run every benchmark once; each prints its own table
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; PYTHONPATH=. $(BIN)/python $$file || exit 1; done

clean: ## Remove .venv and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
