# Everything runs in .venv; `make setup` makes it, and every other target calls for it first.
# `make setup PYTHON=/path/to/python3` chooses the interpreter (3.11 or newer).

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS ?= host,dev

# Options of single targets: `make demo ARGS="--moves 8"`, `make test ARGS="-k ledger"`.
ARGS ?=
# Most tests wait for processes to start and for deadlines to pass, so more of them run than there are cores.
# They are given whole files, in the order of tests/conftest.py: those first that take long.
TEST_PROCESSES ?= 4
TEST_SECONDS ?= 3000
SOAK_MOVES ?= 100
FUZZ_SECONDS ?= 600
EXPLORE_SECONDS ?= 120
STORMS ?= 3000

# The suite starts some 2,500 processes: where bytecode isn't kept, each of them compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format soak bench fuzz doctor pins tree image clean

help: ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do \
		printf '  make %-8s %s\n' "$$name" "$$what"; done

setup: $(READY) ## make .venv and install WorldMove in it; does nothing when that is up to date

# The build backend is installed first and pinned like the rest: no isolated build fetches another one. The
# sources are found by a path (editable_mode=compat); the default's import hook costs each process 15 ms.
$(READY): pyproject.toml constraints.txt
	@python="$$(PYTHON='$(PYTHON)' sh tools/bootstrap.sh)" && \
		{ $(BIN)/python -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation --config-settings editable_mode=compat --editable '.[$(EXTRAS)]'
	@touch $(READY)

demo: setup ## two nodes, one living world: watch it move there and back, bit for bit
	$(BIN)/worldmove demo $(ARGS)

# A test process that crashes is not replaced: with whole files handed out, the run would wait for ever. What
# hangs all the same ends after TEST_SECONDS, which is over four times what the suite takes; without --foreground,
# Ctrl-C would not reach the tests.
# A few tests that failed (exit code 1: no crash, nothing left behind) run once more, alone: real processes have
# real deadlines, and a slow machine with four tests at once may miss one. Both reports are shown.
test: setup ## the whole suite; the last lines say how many tests were skipped
	timeout --foreground --kill-after=30 $(TEST_SECONDS) $(BIN)/python -m pytest -n $(TEST_PROCESSES) \
		--dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(ARGS) || $(BIN)/python tools/again.py $$? $(ARGS)

lint: setup ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: setup ## SOAK_MOVES moves (100 unless told otherwise) of several worlds while things go wrong
	$(BIN)/worldmove soak --moves $(SOAK_MOVES) $(ARGS)
	SCHEMATHESIS_SECONDS=$(EXPLORE_SECONDS) $(BIN)/python -m pytest -q tests/test_security_schemas.py
	STORM_EXAMPLES=$(STORMS) $(BIN)/python -m pytest -q tests/test_machine_storm.py

bench: setup ## every figure of docs/benchmarks.md, measured on this machine
	$(BIN)/worldmove bench boundary
	$(BIN)/worldmove bench digest
	$(BIN)/worldmove bench path
	$(BIN)/worldmove bench delta

# Without a wheel of atheris for this Python, hypothesis makes the inputs.
fuzz: setup ## every decoder of foreign bytes against FUZZ_SECONDS (600) of fuzzing
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--only-binary :all: atheris
	$(BIN)/python tools/fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

doctor: setup ## what this machine can do, and what is in the way
	$(BIN)/worldmove doctor

pins: setup ## resolve the dependencies afresh and write constraints.txt
	$(BIN)/python tools/pins.py

tree: setup ## renew the annotated tree of docs/modules.md
	$(BIN)/python tools/tree.py

image: ## the container image
	docker build --tag worldmove .

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out
