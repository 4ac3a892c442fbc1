# make demo    compile two models and read the text in a picture
# make test    everything that CI runs
# make help    the other targets

PYTHON ?= python3
SECONDS ?= 600
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARM := .cache/arm/finished
TRITON := .cache/triton/finished

.DEFAULT_GOAL := help
.PHONY: help demo test triton test-arm test-gpu nightly fuzz lint types fast format clean system

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: system $(STAMP)  ## Read the text in a picture with two compiled models.
	$(BIN)/python examples/ocr/main.py

test: system $(STAMP) $(ARM) $(TRITON) lint types  ## Lint, type-check, and run all tests.
	HYBRIDC_KERNEL_CACHE=$(CURDIR)/.cache/kernels $(BIN)/python -m pytest -n 2 --dist worksteal

nightly: $(STAMP)  ## All of ONNX's tests, all models, 10,000 random graphs and calls to a failing server.
	HYBRIDC_CONFORMANCE=all $(BIN)/python -m pytest -n 2 tests/conformance
	HYBRIDC_REAL_MODELS=all $(BIN)/python -m pytest -n 2 tests/real
	HYBRIDC_GRAPHS=10000 $(BIN)/python -m pytest tests/graphs
	$(BIN)/python -m tests.remote.storm 10000

fuzz: $(STAMP)  ## Damaged models for SECONDS=600; stops at the first that breaks the compiler.
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[fuzz]"
	mkdir -p .cache/fuzz
	$(BIN)/python -m tests.fuzz.fuzz_models .cache/fuzz -max_total_time=$(SECONDS) \
		-timeout=120 -rss_limit_mb=8192 -artifact_prefix=.cache/fuzz-

fast: $(STAMP)  ## Run the tests that take seconds.
	$(BIN)/python -m pytest -m "not slow"

lint: $(STAMP)  ## Check style.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## Type-check the installed package.
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $(VENV)/typed --upgrade .
	cd $(VENV)/typed && ../bin/mypy --config-file ../../pyproject.toml -p hybridc

format:  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-arm: system $(STAMP) $(ARM)  ## Run all real models on AArch64, emulated; takes half an hour.
	HYBRIDC_ARM_MODELS=all $(BIN)/python -m pytest tests/arm

test-gpu: $(STAMP)  ## Build the bundles for GPU tests and check them on this machine's GPU.
	PYTHON=$(BIN)/python sh tests/gpu/prepare.sh build/gpu \
		$$($(BIN)/python -c "import platform; print('.'.join(platform.python_version_tuple()[:2]))")
	PYTHON=$(BIN)/python sh build/gpu/run.sh

triton: $(TRITON)  ## Fetch the Triton server that tests and benchmarks of hybrid bundles use.

clean:  ## Remove what was made here.
	rm -rf $(VENV) build .cache demo-output *.egg-info

# A C linker is all that is needed beside Python; lld links for other architectures.
system:
	@tools/system-packages

# Without it, on a machine that is no Debian, the tests that want it are skipped.
$(ARM): | $(STAMP)
	-sh tests/arm/prepare.sh $(dir $@) $(BIN)/python

# The same on a machine that is not Linux on x86-64.
$(TRITON): | $(STAMP)
	-sh tools/triton-packages $(dir $@) $(BIN)/python

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[test]"
	touch $@
