# Every target makes .venv itself; a machine with Python 3.11 or newer and make needs nothing else.
# Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
BIN    := .venv/bin
DEV    := .venv/.installed
PEERS  := .venv/.installed-peers

# Most tests wait for processes more than they compute, so two files run side by side.
JOBS   ?= 2
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadfile

.PHONY: help demo test test-unit test-slow test-conformance test-steady conformance fuzz lint format bench bench-checkpoints bench-tcp bench-peers clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(DEV) ## see farstep train a model over three workers, in a minute
	$(BIN)/farstep demo

test: $(DEV) ## every test
	$(PYTEST)

test-unit: $(DEV) ## the quick tests
	$(PYTEST) -m "not slow"

test-slow: $(DEV) ## the slow tests that are farstep's own
	$(PYTEST) -m "slow and not conformance"

test-conformance: $(DEV) ## PyTorch's own test-suite, through pytest
	$(BIN)/pytest -m conformance

test-steady: $(DEV) ## tests again and again on busy cores: make test-steady K=killed TIMES=10
	cd tests && ../$(BIN)/python -m support.steady --times $(or $(TIMES),1) -- $(if $(K),-k '$(K)',-n $(JOBS) --dist loadfile) $(ARGS)

conformance: $(DEV) ## the same by hand: make conformance K=rref IMPL=torch
	cd tests && ../$(BIN)/python -m conformance $(if $(K),-k '$(K)') $(if $(IMPL),--impl $(IMPL)) $(ARGS)

fuzz: $(DEV) ## a million inputs that nobody meant: make fuzz INPUTS=20000 TARGET=messages SEED=7
	cd tests && ../$(BIN)/python -m fuzz --inputs $(or $(INPUTS),1000000) $(if $(TARGET),--target $(TARGET)) $(if $(SEED),--seed $(SEED))

lint: $(DEV) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) ## measure against torch's RPC, write bench/RESULTS.md
	$(BIN)/python -m bench $(ARGS)

bench-checkpoints: $(DEV) ## measure saving and loading, write bench/CHECKPOINTS.md
	$(BIN)/python -m bench --checkpoints $(ARGS)

bench-tcp: $(DEV) ## measure calls over TCP, encrypted, beside torch's, write bench/TCP.md
	$(BIN)/python -m bench.tcp $(ARGS)

bench-peers: $(PEERS) ## the same, with gRPC and Ray as further columns
	$(BIN)/python -m bench --peers $(ARGS)

clean: ## remove .venv and everything generated
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist farstep-demo src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEV): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "farstep needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	@touch $@

$(PEERS): $(DEV)
	$(BIN)/pip install -c constraints.txt -e '.[dev,bench]'
	@touch $@
