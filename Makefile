# A few words; `make` alone lists them. Everything runs in `.venv`, built from requirements.lock.

.DEFAULT_GOAL := words
.DELETE_ON_ERROR:
.SUFFIXES:

BIN := .venv/bin
STAMP := .venv/.stamp
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# The first that can build a virtual environment wins; `make PYTHON=/path/to/python` overrides it.
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11
FIT := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: words setup demo check lint types imports format test drill lock clean \
  bench-engine bench-leak bench-scan bench-watch
words: ## list the words
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	  awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

setup: $(STAMP) ## build .venv from requirements.lock and fetch the small model

demo: $(STAMP) ## make a prefill/decode pair go silent here, and show it found, repaired, proven
	@$(BIN)/tandem demo

drill: $(STAMP) ## rehearse one failure: make drill NAME=...; without a name, list them
	@$(BIN)/tandem drill $(if $(NAME),$(NAME),--list) $(ARGS)

bench-engine: $(STAMP) ## speed and size against llama.cpp's own server; QUICK=1 for 4 minutes
	@$(BIN)/python benchmarks/engine.py

bench-leak: $(STAMP) ## 53,000 requests, and nothing may be kept; QUICK=1 for 4 minutes
	@$(BIN)/python benchmarks/leak.py

bench-scan: $(STAMP) ## the metrics scanner against prometheus_client; QUICK=1 is shorter
	@$(BIN)/python benchmarks/scan.py

bench-watch: $(STAMP) ## how soon stalls are noticed, false findings, cost; QUICK=1 for 8 minutes
	@$(BIN)/python benchmarks/watch.py $(ARGS)

test: check ## the checks, then every test
	@$(BIN)/python -m pytest $(ARGS)

check: lint types imports ## lint, types and import rules

lint: $(STAMP)
	@$(BIN)/ruff check --quiet && $(BIN)/ruff format --quiet --check

types: $(STAMP)
	@$(BIN)/mypy --no-error-summary

imports: $(STAMP)
	@$(BIN)/lint-imports --no-logo

format: $(STAMP) ## rewrite the tree in the one format
	@$(BIN)/ruff format --quiet
	@$(BIN)/ruff check --quiet --fix

lock: ## resolve pyproject.toml anew into requirements.lock
	@$(find-python); "$$python" -m venv build/lock
	@build/lock/bin/pip install -qq pip-tools
	@build/lock/bin/pip-compile --quiet --upgrade --all-extras --strip-extras --allow-unsafe \
	  --no-header --annotation-style=line \
	  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	  --output-file requirements.lock pyproject.toml

clean: ## remove .venv and every cache
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Sets the shell variable `python`, or ends with one sentence.
define find-python
python=; for candidate in $(if $(PYTHON),"$(PYTHON)",$(PYTHONS)); do \
  if "$$candidate" -c '$(FIT)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo "no Python >= 3.11 with venv in: $(or $(PYTHON),$(PYTHONS)). Install one (Debian:" \
    "apt-get install python3 python3-venv), or name one: make PYTHON=/path/to/python" >&2; \
  exit 1; \
fi
endef

# A moved or renamed clone has scripts that point at its old place: its stamp counts as missing.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

# Built from nothing each time, and the stamp comes last: an interrupted set-up leaves none.
$(STAMP): requirements.lock pyproject.toml
	@$(find-python); \
	echo "setting up .venv with $$("$$python" --version): about a minute"; \
	rm -rf .venv && "$$python" -m venv .venv
	@echo "  installing the $$(grep -c == requirements.lock) pinned packages"
	@$(BIN)/pip install -qq --requirement requirements.lock
	@$(BIN)/pip install -qq --no-deps --no-build-isolation --editable .
	@echo "  fetching the small model"
	@$(BIN)/python -m tandem_engine fetch-model >/dev/null
	@printf '%s\n' '$(CURDIR)' > $@
	@echo "  .venv is ready"
