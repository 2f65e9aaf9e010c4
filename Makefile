# The two commands a new user needs are `make chat` and `make test`; the other words are their parts.
.PHONY: help chat test test-full unit check setup bench bench-quick bench-pages lock clean
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
# Only wheels: nothing is ever compiled. Hashes: what is installed is what was reviewed.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes
SELF := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .

help:                       ## list these words
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 16

chat: setup                 ## set up, fetch the default model, talk to it
	@$(BIN)/afterglow chat

test: .venv/development check   ## everything CI runs
	@$(BIN)/python -m pytest

test-full: .venv/development check   ## the same with the big counts
	@$(BIN)/python -m pytest -m "full or not full" --timeout 3600

unit: .venv/development     ## what needs no model, in seconds
	@$(BIN)/python -m pytest tests/layers tests/unit

check: .venv/development    ## format, lint, types
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy --no-error-summary

bench: .venv/development    ## what it takes beside llama-server, up to an hour; leave the machine alone meanwhile
	@$(BIN)/python benchmarks/all.py

bench-quick: .venv/development   ## the same checks on less work, in five minutes
	@$(BIN)/python benchmarks/all.py --quick

bench-pages: .venv/bench    ## the table of README.md and the plots of docs/speed.md, from benchmarks/results
	@$(BIN)/python benchmarks/results.py

setup: .venv/runtime        ## the environment that `make chat` needs

.venv/runtime: requirements/runtime.lock pyproject.toml
	@echo "setting up .venv (a minute or two, once)" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "afterglow needs Python 3.11 or newer; try: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv .venv
	@$(INSTALL) --requirement requirements/runtime.lock
	@$(SELF)
	@touch $@

.venv/development: requirements/development.lock .venv/runtime
	@$(INSTALL) --requirement requirements/development.lock
	@touch $@

.venv/bench: requirements/bench.lock .venv/development
	@$(INSTALL) --requirement requirements/bench.lock
	@touch $@

lock:                       ## resolve the dependencies again (needs `uv` on the PATH)
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    pyproject.toml --group build --output-file requirements/runtime.lock
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    pyproject.toml --group build --group dev --extra hub --constraint requirements/runtime.lock \
	    --output-file requirements/development.lock
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    --group bench --constraint requirements/development.lock --output-file requirements/bench.lock

clean:                      ## remove the environment
	@rm -rf .venv
