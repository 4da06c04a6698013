# Octavo's entry points. Each sets up `.venv` by itself; nothing else is needed than Python 3.11+ and `make`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := torchao
# Tools that octavo.integrations is tested with where they are installed. Their requirements would replace other packages.
TOOLS  := torchtitan torch_checkpointing torchdata tyro docstring_parser typeguard einops spmd_types==0.2.3 \
          diffusers requests urllib3 certifi charset_normalizer importlib_metadata zipp trl bitsandbytes \
          wandb platformdirs gitpython gitdb smmap sentry-sdk protobuf mlflow mlflow-skinny mlflow-tracing alembic mako cachetools \
          click cloudpickle cryptography cffi databricks-sdk fastapi starlette opentelemetry-api opentelemetry-sdk \
          opentelemetry-proto opentelemetry-semantic-conventions pandas python-dateutil pytz scipy sqlalchemy sqlparse idna \
          compressed-tensors loguru
# By themselves: Transformers imports torchvision where it finds it, and PyPI's needs a CUDA build of torch.
VISION := timm torchvision==0.28.0
TRITON := 3.6
# The oldest release of torch that pyproject.toml allows and the newest that is tested, with what each is tested with.
TORCHES := 2.11.0 2.14.1
WITH_2.11.0 := triton==3.6.0 'numpy<2.3'
WITH_2.14.1 := triton==3.8.0
# Tests of the library alone: they start no trainer.
LIBRARY := runtime numerics kernels activations nn optim comm parallel inspect planner serving integrations compat
QUIET  := --quiet --disable-pip-version-check
PIP    := $(BIN)/python -m pip $(QUIET)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-slow test-tools test-versions lint docs sass gpu bench clean

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

$(VENV)/.docs: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what builds the documentation into $(VENV) (once) ..."
	@$(PIP) install --upgrade 'pip>=25.1'
	@$(PIP) install --no-compile --constraint constraints.txt --group docs
	@touch $@

$(VENV)/.peers: $(VENV)/.developer
	@$(PIP) install --no-deps --upgrade --target $(VENV)/peers $(PEERS)
	@touch $@

$(VENV)/.tools: $(VENV)/.developer
	@rm -rf $(VENV)/tools $(VENV)/vision
	@$(PIP) install --no-deps --target $(VENV)/tools $(TOOLS)
	@$(PIP) install --no-deps --target $(VENV)/vision $(VISION)
	@touch $@

$(VENV)/.triton-$(TRITON): $(VENV)/.developer
	@$(PIP) install --no-deps --upgrade --target $(VENV)/triton-$(TRITON) triton==$(TRITON).0
	@touch $@

$(VENV)/torch-%/.ready: pyproject.toml
	@echo "installing torch $* and what the tests need into $(@D) (gigabytes, once) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip $(QUIET) install --upgrade 'pip>=25.1'
	@$(@D)/bin/python -m pip $(QUIET) install --no-compile torch==$* $(WITH_$*) --editable '.[train]' --group test
	@touch $@

setup: $(VENV)/.developer  ## Make .venv with everything a developer needs

demo: $(VENV)/.user  ## Train a small Llama in BF16 and with every FP8 switch, and compare them (3 to 8 minutes on 2 cores)
	@$(BIN)/octavo demo

lint: $(VENV)/.developer  ## Ruff (rules and formatting) and mypy
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/ruff format --check src tests benchmarks examples
	@$(BIN)/mypy

test: lint  ## Lint, types, and the tests of some minutes
	@$(BIN)/python -m pytest -n 2 --durations=15 -m 'not slow and not gpu and not thorough'

test-all: lint  ## The same, and the tests that take longer (about a quarter of an hour in all)
	@$(BIN)/python -m pytest -n 2 --durations=15 -m 'not slow and not gpu'

test-slow: $(VENV)/.peers $(VENV)/.triton-$(TRITON) lint  ## All tests, with the slow ones, torchao and an older Triton
	@$(BIN)/python -m pytest -n 2 -m 'not gpu'

test-tools: $(VENV)/.tools  ## Tests with torchtitan, TRL, diffusers, timm, compressed-tensors, W&B …
	@PYTHONPATH=$(VENV)/tools $(BIN)/python -m pytest -n 2 -m 'not gpu' \
	  tests/integrations tests/nn/test_linear_like.py tests/serving/test_export_layouts.py tests/test_examples.py
	@PYTHONPATH=$(VENV)/vision $(BIN)/python -m pytest -m 'not gpu' tests/test_examples.py -k timm

test-versions: $(TORCHES:%=$(VENV)/torch-%/.ready)  ## The library's tests on the oldest and the newest torch (downloads GBs)
	@failed=; for torch in $(TORCHES); do \
	  echo "torch $$torch:"; \
	  $(VENV)/torch-$$torch/bin/python -m pytest -n 2 $(LIBRARY:%=tests/%) || failed="$$failed $$torch"; \
	done; \
	test -z "$$failed" || { echo "tests fail on torch$$failed"; exit 1; }

# Without --quiet, which would keep warnings from --strict.
docs: $(VENV)/.docs  ## Build the documentation site into build/site; warnings and broken links fail
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "built build/site; python -m http.server -d build/site shows it"

sass: $(VENV)/.triton-$(TRITON)  ## What Triton's compilers make of each kernel, for four GPUs; needs none (minutes)
	@$(BIN)/python -m benchmarks sass
	@PYTHONPATH=$(VENV)/triton-$(TRITON) $(BIN)/python -m benchmarks sass --capability 90

gpu: $(VENV)/.developer  ## Checks and benchmarks on a GPU (TOTAL=4 minutes, STAGES=smoke,linear); a rehearsal without one
	@$(BIN)/python -m benchmarks gpu $(if $(STAGES),--stages $(STAGES)) $(if $(TOTAL),--total $(TOTAL)) --peers $(VENV)/peers

bench: $(VENV)/.peers  ## Time the linear layer on this machine beside torchao, and renew docs/performance.md
	@$(BIN)/python -m benchmarks linear
	@$(BIN)/python -m benchmarks performance

clean:           ## Remove .venv, caches and run outputs
	rm -rf $(VENV) runs build .pytest_cache .hypothesis .mypy_cache .ruff_cache src/*.egg-info
