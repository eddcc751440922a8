PYTHON ?= python3
JAX ?= 0.11.2
JOBS ?= 4
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed-jax-$(JAX)
LATEST = .venv-latest
# jax's CUDA plugin has a compiler that needs no GPU: the tests compile the kernels for an H200 with it. It lies
# beside the packages, not among them: jax complains of a plugin that finds no driver.
PLUGIN = $(VENV)/cuda-plugin

.PHONY: demo test test-all test-gpu test-latest lint bench clean help
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "jattn needs Python >= 3.12, but $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[models,plot,test,dev]' $(if $(filter latest,$(JAX)),'jax<0.13',jax==$(JAX))
	@touch $@

$(PLUGIN): $(STAMP)
	$(BIN)/pip install -q --target $@ --no-deps \
	  $(foreach wheel,jax-cuda13-plugin jax-cuda13-pjrt,$(if $(filter latest,$(JAX)),'$(wheel)<0.13',$(wheel)==$(JAX)))

demo: $(STAMP)  ## complete a few prompts with the model that ships here
	$(BIN)/python -m examples.demo

test: $(STAMP) $(PLUGIN)  ## the fast tests, on the CPU
	$(BIN)/python -m pytest -n 2

test-all: $(STAMP) $(PLUGIN)  ## the slow tests too
	$(BIN)/python -m pytest -n 2 -m 'not gpu'

test-gpu:  ## on a machine with an NVIDIA GPU whose python3 has jax; most of the time goes into compiling, so JOBS=14 helps
	XLA_PYTHON_CLIENT_PREALLOCATE=false JATTN_TEST_GPU=1 $(PYTHON) -m pytest -m gpu -n $(JOBS) --dist worksteal

test-latest:  ## the fast tests on the newest jax that is allowed
	$(MAKE) test VENV=$(LATEST) JAX=latest

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove what make made
	rm -rf .venv .venv-latest build dist .mypy_cache .ruff_cache .pytest_cache
