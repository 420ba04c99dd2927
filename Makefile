# Every target makes its own environment. Needs only Python 3.11 or later and make.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest -q --dist loadscope --no-loadscope-reorder

.PHONY: setup demo test test-all faults faults-extra fuzz ui lint reproducible bench plugins clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS="ignore:Editable installation" \
	  $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup  ## D_0 and one iteration of co-evolution on MiniWoB++, on the CPU
	$(VENV)/bin/coepg evolve sandbox --through 1 --on laptop
	$(VENV)/bin/coepg results sandbox

ui: setup  ## the Dagster web UI and daemon, on http://127.0.0.1:3000
	$(VENV)/bin/coepg ui

# modules are compiled once, whatever the environment says: the tests start many processes that import them
test test-all faults: export PYTHONDONTWRITEBYTECODE :=

test: setup  ## lint goes on beside the tests; three processes for two cores, since some of them wait for Dagster
	$(MAKE) lint & lint=$$!; \
	$(PYTEST) -n 3; passed=$$?; \
	wait $$lint && exit $$passed

test-all: faults-extra  ## also the tests marked `long`: daemon and web server, Ray, hub, killed processes
	$(PYTEST) -n 2 -m ""

faults: faults-extra  ## the whole fault matrix of docs/reliability.md
	$(PYTEST) -n 2 -m "" tests/faults tests/assets/test_boundary.py

faults-extra: setup
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[faults]"

lint: setup  ## mypy and import-linter see assets/ and resources/ where they are imported from, through links
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/coepg_dagster
	ln -s $(CURDIR)/coepg_dagster/* $(CURDIR)/assets $(CURDIR)/resources build/typed/coepg_dagster/
	MYPYPATH=build/typed $(VENV)/bin/mypy -p coepg_dagster
	cd build/typed && $(CURDIR)/$(VENV)/bin/lint-imports --no-logo --no-cache $(CURDIR)/pyproject.toml

reproducible: setup  ## the sandbox twice with the same seed: the same data versions of D_0, D_1, D_2
	$(VENV)/bin/python -m tests.reproducible

BENCHMARKS := scoring_cpu scoring_overlap grpo_rollouts_per_second grpo_vs_trl memory_slope screen_decode audit_page definitions_load

bench: setup  ## eight benchmarks that need no GPU; each writes benchmarks/baselines/NAME.json
	for name in $(BENCHMARKS); do $(VENV)/bin/python -m benchmarks.$$name || exit 1; done

SECONDS ?= 60
FUZZERS ?=

fuzz: setup  ## coverage-guided fuzzers, SECONDS each (make fuzz SECONDS=3600 FUZZERS="planner tfrecord"); needs Linux
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[fuzz]"
	$(VENV)/bin/python -m tests.fuzz --seconds $(SECONDS) $(FUZZERS)

plugins: setup  ## iteration 1 of the overlay of each plug-in, against the sandbox; hours
	$(VENV)/bin/python -m benchmarks.plugins

clean:
	rm -rf store .dagster build *.egg-info
