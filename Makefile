# The two commands: `make demo` and `make test`. Everything else is a part of them, or a longer run of its own.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3.11
ACCEL ?= cpu
MPI ?= wheel
TORCH ?= 2.13.0
DEV ?= yes
LOCK ?= yes
UPGRADE ?= no
SEEDS ?= 1-40
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: help env lock audit demo test test-newest lint types unit cluster-test launch-test slurm-test fault-test fuzz chaos-demo monitoring-test metric-docs plans snapshots bench-cross-node wheel clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

env: ## Make the environment in .venv (ACCEL=cpu|cuda, MPI=wheel|site, PYTHON=python3.11|python3.12, LOCK=yes|no, DEV=yes|no)
	@PYTHON=$(PYTHON) ACCEL=$(ACCEL) MPI=$(MPI) TORCH=$(TORCH) LOCK=$(LOCK) DEV=$(DEV) VENV=$(VENV) launchers/make_env.sh

lock: ## Lock the packages of `make env` with their hashes, in launchers/locks (UPGRADE=yes: each at its newest release)
	@PYTHON=$(PYTHON) TORCH=$(TORCH) UPGRADE=$(UPGRADE) launchers/lock.sh write

audit: ## Ask which locked versions have known vulnerabilities
	@PYTHON=$(PYTHON) TORCH=$(TORCH) launchers/lock.sh audit

demo: env ## Race ladder against standard on two MPI ranks, kill one, resume
	@$(PY) -m laddertron.tools.demos.demo

test: env lint types unit ## Lint, types, tests

test-newest: ## What newer releases break: `make test` in build/newest, with the newest that pyproject.toml allows (weekly)
	@rm -rf build/newest
	@$(MAKE) env VENV=build/newest LOCK=no
	@ACCEL=$(ACCEL) launchers/lock.sh newer build/newest
	@$(MAKE) -k lint types unit VENV=build/newest

lint:
	@echo "== lint"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/lint-imports --no-cache --no-logo

types:
	@echo "== types"
	@mkdir -p build/typecheck && ln -sfn "$(CURDIR)" build/typecheck/laddertron
	@MYPYPATH=build/typecheck $(VENV)/bin/mypy -p laddertron.topology -p laddertron.models -p laddertron.engine -p laddertron.launchers -p laddertron.tools.plan -p laddertron.tools.bench -p laddertron.tools.train -p laddertron.tools.demos
	@MYPYPATH=build/typecheck:tests:tools/benchmarks:tools/benchmarks/cross_node:tools/benchmarks/gpu:tools/gpu_dry:$$($(PY) tests/helpers/folders.py) $(VENV)/bin/mypy --explicit-package-bases tests tools/benchmarks tools/gpu_dry

unit:
	@echo "== tests"
	@$(VENV)/bin/pytest tests -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: test-busy test-seeds slow-test
# Each loop ends with the shell that started it, even after SIGKILL.
test-busy: env ## The tests with four concurrent busy loops: no outcome may depend on how fast the machine is (half an hour)
	@for loop in 1 2 3 4; do while kill -0 $$$$; do for ((i = 0; i < 20000; i++)); do :; done; done 2>/dev/null & done; $(MAKE) unit

test-seeds: env ## Every test that draws, with seeds 1 to 40 and hypothesis at random, before a release (SEEDS=1-40; hours)
	@LADDERTRON_SEED=$(SEEDS) $(VENV)/bin/pytest tests -m "draws and not slow" -n 2 --dist worksteal

slow-test: env ## What `make test` leaves out for its length: whole matrices, preflight under torchrun (minutes)
	@$(VENV)/bin/pytest tests -m slow --ignore tests/cluster --ignore tests/faults

.PHONY: cross-compile
cross-compile: ## Compile all C for aarch64, warnings are errors (Debian's gcc-aarch64-linux-gnu)
	@$(VENV)/bin/pytest tests/install/test_build.py -m slow -rs

.PHONY: image image-test
image: ## Build the container image laddertron:ACCEL with podman, buildah or docker (CUDA wants a BASE: see Containerfile)
	@$$(command -v podman || command -v buildah || command -v docker) build -t laddertron:$(ACCEL) -f Containerfile $(foreach arg,ACCEL PYTHON TORCH_INDEX BASE,$(if $($(arg)),--build-arg $(arg)=$($(arg)))) .

image-test: env ## Build the image and run the demo in it, as its own user (root; buildah, debootstrap; ten minutes)
	@$(VENV)/bin/pytest tests/install/test_image.py -m slow -s

wheel: env ## Build a wheel into dist/ and see that it installs and starts
	@rm -rf dist build/wheel-check
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
	@$(PY) -m venv build/wheel-check
	@build/wheel-check/bin/python -m pip install --quiet dist/laddertron-*.whl
	@cd / && "$(CURDIR)/build/wheel-check/bin/laddertron" plan --model llama-3.1-405b --nodes 2x8xH100
	@ls -l dist

clean: ## Remove what was made, .venv included
	rm -rf .venv build dist *.egg-info */*/_*.so

plans: ## Renew docs/plans: two plans, the index of all, and the accuracy of the simulator (extra `plot`)
	@$(PY) tools/benchmarks/plan_docs.py

snapshots: ## Renew tests/golden/snapshots after a change of help, API, messages, metrics or wire forms that is meant
	@LADDERTRON_RENEW_SNAPSHOTS=1 $(VENV)/bin/pytest tests/test_snapshots.py
	@git diff --stat -- tests/golden/snapshots

cluster-test: env ## Tests on emulated nodes, MPICH too (root; part of `make test` but for MPICH, which is fetched here)
	@test -x build/mpich/bin/mpiexec || $(PY) -m pip install -q --no-deps --prefix build/mpich mpich==5.0.2
	@$(VENV)/bin/pytest tests/cluster --ignore tests/cluster/test_monitoring_live.py

launch-test: env ## Open MPI and MPICH on 2 and 4 emulated nodes, replicas lost and resumed (root; four minutes)
	@test -x build/mpich/bin/mpiexec || $(PY) -m pip install -q --no-deps --prefix build/mpich mpich==5.0.2
	@$(VENV)/bin/pytest tests/cluster/test_launch.py

slurm-test: env ## Slurm on two emulated nodes: srun, drain, requeue, resume (root; Debian's slurmctld slurmd slurm-client munge libpmix-dev)
	@PYTHONPATH=tests $(PY) -m cluster.slurm
	@test -x build/mpich/bin/mpiexec || $(PY) -m pip install -q --no-deps --prefix build/mpich mpich==5.0.2
	@$(VENV)/bin/pytest tests/cluster/test_slurm.py

.PHONY: judges
judges: env ## Public clients, agent libraries and load generators, behind nginx (JUDGES=names; 12 GB in build/judges)
	@$(PY) tests/helpers/judges.py $(JUDGES)

.PHONY: gpu-dry
gpu-dry: ## The GPU path without a GPU, its figures as in docs/gpu_dry.md (WRITE=yes renews them; 7 GB in build/gpu-dry)
	@[ -x build/gpu-dry/bin/python ] || [ $$(df --output=avail -k . | tail -n 1) -gt 12000000 ] || { echo "gpu-dry: its environment needs 12 GB of disk while it is made"; exit 1; }
	@$(MAKE) env ACCEL=cuda VENV=build/gpu-dry
	@build/gpu-dry/bin/python tools/gpu_dry/gpu_dry.py $(if $(filter yes,$(WRITE)),--write)

.PHONY: gpu
gpu: ## What one GPU shows, under nine minutes, resumable: build/gpu_day.md (GPU_PYTHON=python3 runs it without `make env`)
	@$(or $(GPU_PYTHON),$(PY)) tools/benchmarks/gpu_day.py

bench-cross-node: env ## Measure across emulated nodes and renew docs/cross_node.md (root; 20 to 50 minutes, quiet machine)
	@$(PY) tools/benchmarks/cross_node/cross_node.py --write

.PHONY: frontier
frontier: env ## Train each wiring alike, measure its speed, renew that section of docs/layouts.md (root; half an hour, quiet machine)
	@$(PY) tools/benchmarks/cross_node/frontier.py --write

fault-test: env ## Faults row by row, 440 seeded kill points (FAULT_SEED, FAULT_FAKE, _REAL, _STANDBY, _NODES; at most 90 minutes)
	@FAULT_STANDBY=$${FAULT_STANDBY:-200} FAULT_NODES=$${FAULT_NODES:-40} timeout -k 30 5400 $(VENV)/bin/pytest tests/faults --ignore tests/faults/test_soak.py tests/launchers/job/test_supervisor.py tests/launchers/job/test_failed_starts.py tests/launchers/job/test_keeper.py tests/launchers/test_app_serve.py -s

.PHONY: soak
soak: env ## Half an hour of everything at once: clients of every kind, kills, a full disk, clock steps (SOAK_SECONDS, SOAK_SEED)
	@$(VENV)/bin/pytest tests/faults/test_soak.py -s

.PHONY: rehearse
rehearse: env ## 405B's deployment on two emulated nodes of eight ranks, from check to acceptance, with faults; renews docs/rehearsal.md (root; Debian's prometheus; 15 to 30 minutes, quiet machine)
	@PYTHONPATH=tests:tests/helpers $(PY) -m cluster.rehearsal --write

chaos-demo: env ## Ranks, keepers, mpirun and the daemon are killed while batches run: every line has one answer (FAULT_REAL kills)
	@FAULT_REAL=$${FAULT_REAL:-12} $(VENV)/bin/pytest tests/faults/test_kill_points.py -k mpirun -s

fuzz: ## The API's description as a fuzzer, some 2,500 requests, and 360 batch files of generated lines: no 5xx (minutes)
	@LADDERTRON_SEED=$${LADDERTRON_SEED:-$$RANDOM} LADDERTRON_FUZZ_CASES=$${LADDERTRON_FUZZ_CASES:-90} $(VENV)/bin/pytest tests/engine/daemon/http/test_app_fuzz.py tests/engine/daemon/http/test_app_lines.py -s

.PHONY: fuzz-parsers
fuzz-parsers: ## Mutated input for each parser of foreign bytes, 100,000 cases each: no crash, bounded time and memory (an hour)
	@LADDERTRON_SEED=$${LADDERTRON_SEED:-$$RANDOM} LADDERTRON_FUZZ_CASES=$${LADDERTRON_FUZZ_CASES:-100000} $(VENV)/bin/pytest tests/test_parser_fuzz.py -s

monitoring-test: env ## Every panel and alert in a real Prometheus over four ranks on two nodes, each fault made (root; ten minutes)
	@$(VENV)/bin/pytest tests/cluster/test_monitoring_live.py -s

metric-docs: env ## Renew docs/metrics.md from the catalogue
	@$(VENV)/bin/laddertron monitoring metrics --markdown > docs/metrics.md
