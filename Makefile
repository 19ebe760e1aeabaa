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

.PHONY: help env demo test lint types unit cluster-test launch-test slurm-test fault-test fuzz chaos-demo monitoring-demo monitoring-test dashboards plans bench-cross-node wheel clean

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
	@MYPYPATH=build/typecheck:tests:benchmarks $(VENV)/bin/mypy --explicit-package-bases tests benchmarks

unit:
	@echo "== tests"
	@$(VENV)/bin/pytest tests -m "not slow" -n 2 --dist loadfile

wheel: env ## Build a wheel into dist/ and see that it installs and starts
	@rm -rf dist build/wheel-check
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
	@$(PY) -m venv build/wheel-check
	@build/wheel-check/bin/python -m pip install --quiet --no-deps dist/laddertron-*.whl click PyYAML rich pygments markdown-it-py mdurl
	@cd / && "$(CURDIR)/build/wheel-check/bin/laddertron" --version
	@ls -l dist

clean: ## Remove what was made, .venv included
	rm -rf .venv build dist *.egg-info */_*.so

plans: ## Renew docs/plans: every shipped configuration's plan, fleets, and how far the simulator carries
	@$(PY) -m laddertron.launchers.plans configs/llama-*.yaml configs/demo*.yaml docs/plans
	@$(PY) benchmarks/simulate_published.py --write

cluster-test: env ## Tests on emulated nodes, MPICH too (root; part of `make test` but for MPICH, which is fetched here)
	@test -x build/mpich/bin/mpiexec || $(PY) -m pip install -q --no-deps --prefix build/mpich mpich==5.0.2
	@$(VENV)/bin/pytest tests/cluster --ignore tests/cluster/test_monitoring_live.py

launch-test: env ## Open MPI and MPICH on 2 and 4 emulated nodes, replicas lost and resumed (root; four minutes)
	@test -x build/mpich/bin/mpiexec || $(PY) -m pip install -q --no-deps --prefix build/mpich mpich==5.0.2
	@$(VENV)/bin/pytest tests/cluster/test_launch.py

slurm-test: env ## Slurm on two emulated nodes: srun, drain, requeue, resume (root; Debian's slurmctld slurmd munge)
	@$(VENV)/bin/pytest tests/cluster/test_slurm.py

bench-cross-node: env ## Measure across emulated nodes and renew docs/performance.md (root; eight minutes, quiet machine)
	@$(PY) benchmarks/cross_node.py --write

fault-test: env ## Faults row by row, 160 + 40 seeded kill points (FAULT_SEED, FAULT_FAKE, FAULT_REAL; at most 30 minutes)
	@timeout -k 30 1800 $(VENV)/bin/pytest tests/faults tests/test_supervisor.py tests/test_app_serve.py -s

chaos-demo: env ## A rank, the daemon and mpirun are killed while a batch runs; every line has one answer
	@$(PY) -m laddertron.launchers.chaos

fuzz: ## The API's description as a fuzzer, some 2,500 requests, and 360 batch files of generated lines: no 5xx (minutes)
	@LADDERTRON_FUZZ_CASES=$${LADDERTRON_FUZZ_CASES:-90} $(VENV)/bin/pytest tests/test_app_fuzz.py tests/test_app_lines.py -s

monitoring-demo: env ## The daemon under load, a real Prometheus with the shipped rules; ^C ends it (Debian's prometheus)
	@$(PY) -m laddertron.launchers.monitoring_demo

monitoring-test: env ## Every panel and alert in a real Prometheus over four ranks on two nodes, each fault made (root; ten minutes)
	@$(VENV)/bin/pytest tests/cluster/test_monitoring_live.py -s

dashboards: env ## Renew docs/metrics.md and configs/monitoring/grafana from the code
	@$(VENV)/bin/laddertron metrics --markdown > docs/metrics.md
	@$(VENV)/bin/laddertron metrics --dashboards configs/monitoring/grafana
