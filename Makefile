# `make chat` and `make test` are the two targets a new user needs; the others are parts of them.
.PHONY: help chat test test-full test-clients test-llama-server test-frameworks test-cluster browser pytest unit check docs setup bench bench-quick bench-pages lock clean
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
# Bytecode is cached even where the environment turns that off: the tests start hundreds of Python processes.
unexport PYTHONDONTWRITEBYTECODE
# Wheels only: nothing is compiled. Hashes: only reviewed files are installed.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes
SELF := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .

# Only root installs packages; a user is never asked for a password.
APT_GET := $(if $(filter 0,$(shell id -u)),apt-get,sudo --non-interactive apt-get) -qq

help:                       ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 16

chat: setup                 ## set up, fetch the default model, start a chat
	@$(BIN)/afterglow chat

test: .venv/development browser   ## everything CI runs, in three processes: two cores are never idle
	@$(MAKE) --no-print-directory --jobs 2 check pytest

test-full: .venv/development browser   ## the same with the long variants
	@$(MAKE) --no-print-directory --jobs 2 check pytest PYTEST_ARGUMENTS='-m "not (clients or frameworks or cluster)" --timeout 3600'

pytest: .venv/development
	@$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGUMENTS)

test-clients: .venv/development   ## Claude Code, Codex and OpenCode on a real server; needs npm, fetches 250 MB once
	@$(BIN)/python -m pytest -m clients tests/clients

test-llama-server: .venv/development   ## llama.cpp's own server tests on llama-server and afterglow, with SmolLM2
	@$(BIN)/python tests/llamacpp_suite/run.py

test-frameworks: .venv/frameworks   ## pydantic-ai, openai-agents and smolagents on a real server
	@$(BIN)/python -m pytest -m frameworks tests/frameworks

test-cluster: .venv/ray     ## replicas on a Ray cluster of this machine, with SmolLM2; about fifteen minutes
	@.venv/ray/bin/python -m pytest -m cluster tests/cluster

browser:                    ## install Chromium for the tests of the web page, with apt-get, if there is none
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	    || { $(APT_GET) update && $(APT_GET) install --yes --no-install-recommends chromium; } >/dev/null 2>&1 \
	    || if [ "$$CI" = true ]; then echo "Chromium cannot be installed, and CI needs it" >&2; exit 1; \
	    else echo "no Chromium: the tests of the web page in a browser are left out" >&2; fi

unit: .venv/development     ## tests without llama.cpp, in less than 30 seconds
	@$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not (native or model or slow or full or frameworks or cluster)"

check: .venv/development    ## format, lint, types
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy --no-error-summary

bench: .venv/development    ## all benchmarks against llama-server, about 75 minutes on an idle machine
	@$(BIN)/python benchmarks/all.py

bench-quick: .venv/development   ## the same checks on smaller workloads, ten minutes
	@$(BIN)/python benchmarks/all.py --quick

bench-pages: .venv/bench    ## write the table of README.md and the plots of docs/speed.md
	@$(BIN)/python benchmarks/results.py

docs: .venv/docs            ## write the generated pages and build the documentation into site/
	@$(BIN)/python scripts/write_settings_page.py
	@$(BIN)/python scripts/write_command_index.py
	@$(BIN)/python scripts/write_options_page.py
	@$(BIN)/python scripts/write_fields_page.py
	@$(BIN)/python scripts/write_memory_tables.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

setup: .venv/runtime        ## create the virtual environment

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

# The frameworks need other versions of the same packages, so that they have an environment of their own.
.venv/frameworks: requirements/frameworks.lock .venv/development
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes --requirement $<
	@touch $@

# Ray has an environment of its own: it is large, and pins versions of packages that the server uses.
.venv/ray: requirements/ray.lock .venv/development
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes --requirement $<
	@$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.venv/docs: requirements/docs.lock .venv/development
	@$(INSTALL) --requirement requirements/docs.lock
	@touch $@

lock:                       ## resolve the dependencies again (needs `uv`)
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    pyproject.toml --group build --output-file requirements/runtime.lock
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    pyproject.toml --group build --group dev --extra hub --extra agents --extra store --constraint requirements/runtime.lock \
	    --output-file requirements/development.lock
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    --group bench --constraint requirements/development.lock --output-file requirements/bench.lock
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    --group docs --constraint requirements/development.lock --output-file requirements/docs.lock
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    --group frameworks --output-file requirements/frameworks.lock
	@uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --quiet \
	    pyproject.toml --group build --group cluster --extra ray --output-file requirements/ray.lock

clean:                      ## remove the virtual environment
	@rm -rf .venv
