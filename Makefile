# `make` alone lists the targets. A target that needs the virtual environment makes it first. The harness
# says 0, 1, 2 or 130; make passes 0 and 130 on, prints a 1 or 2 as "Error 1" or "Error 2", and ends with 2.

PYTHON ?= python3
VENV ?= .venv
# Which set to install; empty: the one that has kernels for this machine's cards (harness/wheels.py).
CONSTRAINTS ?=
# Passed on to the harness, e.g. make quick ARGS="--only dtype=fp16".
ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
HARNESS := $(BIN)/python -m harness
# pip is quiet unless something is wrong; V=1 shows all it says.
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(if $(V),,-qq)
CODE := $(wildcard harness probes reports tc_volta cp_volta tests benchmarks)

.DEFAULT_GOAL := help
.PHONY: help setup test sweep-single sweep-cp quick drill bench doctor verify lint clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make .venv with the torch that has kernels for this machine's cards, and say why
	@echo "$(VENV) is ready, made with $$(cat $(READY)). This machine asks for" >&2
	@$(PYTHON) -m harness.wheels >/dev/null

test: $(READY) ## everything CI runs: lint, types, tests
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest $(ARGS)

sweep-single: $(READY) ## the one-device sweep of this machine's default suite
	@$(HARNESS) run single $(ARGS)

sweep-cp: $(READY) ## the context-parallel sweep of this machine: ranks that share one sequence
	@$(HARNESS) run cp $(ARGS)

quick: $(READY) ## a few cells in a few minutes
	@$(HARNESS) run quick --answers $(ARGS)

drill: $(READY) ## cells that crash, hang and run out of memory on purpose: is each still one row?
	@$(HARNESS) run drill $(ARGS)

bench: $(READY) ## BENCH.md and plots again, from rows already measured (ARGS: the runs)
	@$(HARNESS) report $(ARGS)

doctor: $(READY) ## what this machine can do, decision by decision
	@$(HARNESS) doctor $(ARGS)

verify: $(READY) ## what README, BENCH.md and the catalogue claim, checked as far as this machine can
	@$(HARNESS) verify $(ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

clean: ## remove .venv, caches and build output; measured rows stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last and holds the set's name, so a set-up that failed or was interrupted runs again,
# and one made with another set than CONSTRAINTS names is made anew.
ifneq ($(CONSTRAINTS),)
ifneq ($(CONSTRAINTS),$(shell cat $(READY) 2>/dev/null))
$(READY): FORCE
endif
endif

$(READY): pyproject.toml requirements/default.txt requirements/volta.txt
	@rm -f $@
	@$(PYTHON) -m harness.setup_check
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@set -e; set='$(CONSTRAINTS)'; \
	if [ -n "$$set" ]; then echo "$$set: named by CONSTRAINTS" >&2; else set=$$($(PYTHON) -m harness.wheels); fi; \
	case "$$set" in *volta*) extras=dev,xformers;; *) extras=dev;; esac; \
	echo "installing into $(VENV): pip install -c $$set -e '.[$$extras]' (minutes; V=1 shows it)" >&2; \
	$(PIP) -c "$$set" -e ".[$$extras]"; \
	echo "$$set" > $@
