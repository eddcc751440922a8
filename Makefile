PYTHON ?= python3
JAX ?= 0.11.2
CUDA ?= 13.0.88
JOBS ?= 4
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed-jax-$(JAX)
LATEST = .venv-latest
# jax's CUDA plugin has a compiler that needs no GPU: the tests compile the kernels for an H200 with it, and with the
# ptxas of these wheels. They lie beside the packages, not among them: jax complains of a plugin that finds no driver.
PLUGIN = $(VENV)/cuda-plugin
PLUGIN_STAMP = $(VENV)/.plugin-jax-$(JAX)-cuda-$(CUDA)
PLUGIN_WHEELS = $(foreach wheel,jax-cuda13-plugin jax-cuda13-pjrt,$(if $(filter latest,$(JAX)),'$(wheel)<0.13',$(wheel)==$(JAX))) \
  nvidia-cuda-nvcc==$(CUDA) nvidia-nvvm==$(CUDA)
# Each worker takes half of the tests in their order, so that what a module makes is made once; then it helps the other.
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal

# What Python compiles is kept, whatever the caller's environment says: many processes import jax and the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-kernels test-all test-wheel test-gpu bench test-latest lint clean help
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# Most of what is installed here is never imported: Python compiles the rest where it is.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "jattn needs Python >= 3.12, but $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile -e '.[models,plot,serve,test,dev]' $(if $(filter latest,$(JAX)),'jax<0.13',jax==$(JAX))
	@touch $@

$(PLUGIN_STAMP): $(STAMP)
	rm -rf $(PLUGIN)
	$(BIN)/pip install -q --no-compile --target $(PLUGIN) --no-deps $(PLUGIN_WHEELS)
	@touch $@

demo: $(STAMP)  ## complete a few prompts with the model that ships here
	$(BIN)/python -m examples.demo

test: $(STAMP)  ## the fast tests, on the CPU
	$(PYTEST) -m 'not kernels and not gpu and not slow' --ignore=tests/pallas_kernels

test-kernels: $(STAMP) $(PLUGIN_STAMP)  ## the kernels, interpreted on the CPU and compiled for an H200 without one, and what takes seconds
	$(PYTEST) -m 'kernels and not gpu and not slow'

test-all: $(STAMP) $(PLUGIN_STAMP)  ## both, and the slow tests too
	$(PYTEST) -m 'not gpu'

test-wheel: $(STAMP)  ## build wheel and sdist, and use them as somebody would who has no checkout
	PYTHON=$(BIN)/python .ci/wheel

test-gpu:  ## on a machine with an NVIDIA GPU whose python3 has jax; most of the time goes into compiling, so JOBS=14 helps; SECONDS=500 OUTCOMES=FILE ends by then, and goes on from there when called again
	$(PYTHON) -m benchmarks gpu-tests --jobs $(JOBS) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(OUTCOMES),--outcomes $(OUTCOMES)) $(if $(COMMIT),--commit $(COMMIT))

bench:  ## on a machine with an NVIDIA GPU whose python3 has jax: every suite that writes rows of a GPU, but for tune, one after the other; rows to benchmarks/results
	for suite in decode prefill backward training sparse write graphs host engine starts serve drafts cascades quantization experts load phi3small mesh; do $(PYTHON) -m benchmarks $$suite || exit 1; done

test-latest:  ## `make test test-kernels` on the newest jax that is allowed
	$(MAKE) test test-kernels VENV=$(LATEST) JAX=latest

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove what make made
	rm -rf .venv .venv-latest build dist .mypy_cache .ruff_cache .pytest_cache
