# `make demo` and `make test` do all the set-up themselves. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ACCEPT := wheel grpcurl parity overlap pool cancel kill hand-offs ready idle bad-input models distribution seeds cache beams
PYTEST_ARGS ?=

.PHONY: help env demo bench test test-kernels sanitize gpu-kernels check format protos protos-check protos-release constraints accept $(ACCEPT:%=accept-%) print-python clean

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16
	@echo "accept-NAME     one acceptance check; NAME is one of: $(ACCEPT)"

env: $(STAMP) ## .venv with everything, at the versions of constraints.txt

# torch goes first and alone: asked for by its exact version, pip takes a local CPU build where there is one.
$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Paceline needs Python 3.11 or newer with its venv module: none was found (set PYTHON=...)" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,bench,dev]'
	@touch $@

demo: $(STAMP) ## start a cluster here, stream one answer from it, stop it
	@$(BIN)/python bench/demo.py

test: $(STAMP) ## all tests that need no GPU
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

# Without a GPU the kernels are interpreted.
test-kernels: $(STAMP) ## every kernel and its twin over all combinations of shapes, not just all pairs
	TRITON_INTERPRET=$$($(BIN)/python -c 'import torch; print(int(not torch.cuda.is_available()))') KERNEL_COVER=all \
		$(BIN)/python -m pytest tests/contract/kernels --timeout 0 $(PYTEST_ARGS)

sanitize: $(STAMP) ## small cases of every kernel under compute-sanitizer; needs a GPU
	@$(BIN)/python bench/sanitize.py

gpu-kernels: $(STAMP) ## kernels on a GPU: attention over a full pool, sampling, compute-sanitizer, each in limited time
	@$(BIN)/python bench/gpu_suite.py

check: $(STAMP) protos-check ## lint, types, import directions, stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy bench/*.py bench/stamps/*.py .ci/*.py
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite to the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP) ## regenerate the stubs
	$(BIN)/python .ci/protos.py generate

protos-check: $(STAMP) ## stubs are fresh, and the protos only grew since the last release
	$(BIN)/python .ci/protos.py check

protos-release: $(STAMP) ## take today's protos as the ones that later protos must be compatible with
	$(BIN)/python .ci/protos.py release

constraints: ## pin what .venv has now
	{ sed -n '1p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | grep -v '^#' \
		| sed -E 's/^(torch==[0-9.]+)\+.*/\1/' | LC_ALL=C sort -f; } > constraints.txt.new
	mv constraints.txt.new constraints.txt

accept: $(ACCEPT:%=accept-%) ## every acceptance check

$(ACCEPT:%=accept-%): accept-%: $(STAMP)
	@$(BIN)/python bench/accept.py $*

bench: $(STAMP) ## a cluster on this CPU against transformers, in one run
	@$(BIN)/python bench/speed.py

print-python:
	@echo $(PYTHON)

clean: ## remove what was made, the environment too; the model cache stays
	rm -rf $(VENV) dist build bench/results .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
