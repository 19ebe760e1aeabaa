# The two commands: `make demo` and `make test`. Everything else is a part of them, or a longer run of its own.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11
ACCEL ?= cpu
MPI ?= wheel
TORCH ?= 2.13.0
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: help env demo test lint types unit cluster-test fault-test chaos-demo monitoring-demo bench plans wheel clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

env: ## Make the environment in .venv (ACCEL=cpu|cuda, MPI=wheel|site, PYTHON=python3.11|python3.12)
	@PYTHON=$(PYTHON) ACCEL=$(ACCEL) MPI=$(MPI) TORCH=$(TORCH) VENV=$(VENV) launchers/make_env.sh

demo: env ## Race ladder against standard on two MPI ranks, kill one, resume
	@$(PY) -m laddertron.launchers.demo

test: env lint types unit ## Lint, types, tests

lint:
	@echo "== lint"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

types:
	@echo "== types"
	@mkdir -p build/typecheck && ln -sfn "$(CURDIR)" build/typecheck/laddertron
	@MYPYPATH=build/typecheck $(VENV)/bin/mypy -p laddertron.topology -p laddertron.models -p laddertron.engine -p laddertron.launchers
	@MYPYPATH=build/typecheck:tests $(VENV)/bin/mypy --explicit-package-bases tests benchmarks

unit:
	@echo "== tests"
	@$(VENV)/bin/pytest tests -m "not slow"
