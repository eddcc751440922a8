PYTHON ?= python3
JAX ?= 0.11.2
CUDA ?= 13.0.88
JOBS ?= 4
VENV ?= .venv
comma = ,
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed-jax-$(JAX)
DEMO_STAMP = $(VENV)/.installed-demo-jax-$(JAX)
DOCS_STAMP = $(VENV)/.installed-docs
LATEST = .venv-latest
# The compiler of jax's CUDA plugin needs no GPU: with it and the ptxas of these wheels, tests compile the kernels
# for an H200 and other GPUs. The wheels are installed beside the environment's packages, because jax warns about a CUDA plugin
# that finds no driver.
PLUGIN = $(VENV)/cuda-plugin
PLUGIN_STAMP = $(VENV)/.plugin-jax-$(JAX)-cuda-$(CUDA)
PLUGIN_WHEELS = $(foreach wheel,jax-cuda13-plugin jax-cuda13-pjrt,$(if $(filter latest,$(JAX)),'$(wheel)<0.13',$(wheel)==$(JAX))) \
  nvidia-cuda-nvcc==$(CUDA) nvidia-nvvm==$(CUDA)
# Two workers; each takes half of the tests in order, so that a module's fixtures are built once, then helps the other.
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal

# Keep compiled bytecode whatever the caller's environment says: many processes import jax and the tests.
unexport PYTHONDONTWRITEBYTECODE

# Threads of OpenBLAS wait for work actively, and the tests' products are small.
test test-kernels test-all: export OPENBLAS_NUM_THREADS = 1

.PHONY: demo test test-kernels test-all test-wheel test-gpu bench test-latest lint docs clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# --no-compile: most of what is installed is never imported; Python compiles the rest on first import.
define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "jattn needs Python >= 3.12, but $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile -e '.[$(1)]' $(if $(filter latest,$(JAX)),'jax<0.13',jax==$(JAX))
	@touch $@
endef

$(STAMP): pyproject.toml
	$(call INSTALL,models$(comma)plot$(comma)serve$(comma)test$(comma)dev)

# The demo needs few packages: it is what a newcomer runs first.
$(DEMO_STAMP): pyproject.toml
	$(call INSTALL,models)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install -q --no-compile -e '.[docs]'
	@touch $@

$(PLUGIN_STAMP): $(STAMP)
	rm -rf $(PLUGIN)
	$(BIN)/pip install -q --no-compile --target $(PLUGIN) --no-deps $(PLUGIN_WHEELS)
	@touch $@

demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))  ## complete a few prompts with the model in examples/tiny_model
	$(BIN)/python -m examples.demo
	@echo 'The command line is $(BIN)/jattn: try $(BIN)/jattn generate --model examples/tiny_model "def fib(n):"'

test: $(STAMP)  ## run the fast tests on the CPU
	$(PYTEST) -m 'not kernels and not gpu and not slow' --ignore=tests/pallas_kernels

test-kernels: $(STAMP) $(PLUGIN_STAMP)  ## interpret the kernels on the CPU, compile them for an H200 and other GPUs (no GPU needed), and run the slower tests
	$(PYTEST) -m 'kernels and not gpu and not slow'

test-all: $(STAMP) $(PLUGIN_STAMP)  ## run every test that needs no GPU, the slow ones included
	$(PYTEST) -m 'not gpu'

test-wheel: $(STAMP)  ## build the wheel and the sdist and use them outside of the checkout
	PYTHON=$(BIN)/python .ci/wheel

test-gpu:  ## run the GPU tests with the python3 that has jax; JOBS=14 compiles faster; SECONDS=500 OUTCOMES=FILE stops in time and continues when run again
	$(PYTHON) -m benchmarks gpu-tests --jobs $(JOBS) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(OUTCOMES),--outcomes $(OUTCOMES)) $(if $(COMMIT),--commit $(COMMIT))

bench:  ## run every benchmark suite on an NVIDIA GPU (except tune) and append rows to benchmarks/results
	for suite in decode prefill backward training sparse write graphs host engine starts serve drafts cascades quantization experts load phi3small mesh; do $(PYTHON) -m benchmarks $$suite || exit 1; done

test-latest:  ## run `make test test-kernels` on the newest supported jax
	$(MAKE) test test-kernels VENV=$(LATEST) JAX=latest

lint: $(STAMP)  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS_STAMP)  ## build the documentation into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove everything that make created
	rm -rf .venv .venv-latest build dist .mypy_cache .ruff_cache .pytest_cache
