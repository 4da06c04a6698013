# Octavo's entry points. Each sets up `.venv` by itself; nothing else is needed than Python 3.11+ and `make`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := torchao
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint sass gpu clean

help:            ## List what can be made
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 14

$(VENV)/.user: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing octavo and what its trainer needs into $(VENV) (once) ..."
	@$(PIP) install --constraint constraints.txt torch
	@$(PIP) install --no-compile --constraint constraints.txt --editable '.[train]'
	@touch $@

$(VENV)/.developer: $(VENV)/.user
	@echo "installing test and lint tools into $(VENV) (once) ..."
	@$(PIP) install --upgrade 'pip>=25.1'
	@$(PIP) install --no-compile --constraint constraints.txt --group test --group lint
	@touch $@

$(VENV)/.peers: $(VENV)/.developer
	@$(PIP) install --no-deps --upgrade --target $(VENV)/peers $(PEERS)
	@touch $@

setup: $(VENV)/.developer  ## Make .venv with everything a developer needs

demo: $(VENV)/.user  ## Train a small Llama in BF16 and in FP8 and compare them (a few minutes on 2 cores)
	@$(BIN)/octavo demo

lint: $(VENV)/.developer  ## Ruff (rules and formatting) and mypy
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/ruff format --check src tests benchmarks examples
	@$(BIN)/mypy

test: lint  ## Lint, type-check, and run the tests
	@$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.peers lint  ## All tests, with the slow ones and the cross-check against torchao
	@$(BIN)/python -m pytest -n 2 -m 'not gpu'

sass: $(VENV)/.developer  ## What Triton's compiler makes of each kernel for Hopper; needs no GPU
	@$(BIN)/python -m benchmarks sass

gpu: $(VENV)/.developer  ## The tests that need a GPU with FP8 matrix units
	@$(BIN)/python -m pytest -m gpu

clean:           ## Remove .venv, caches and run outputs
	rm -rf $(VENV) runs build .pytest_cache .hypothesis .mypy_cache .ruff_cache src/*.egg-info
