# Everything runs in .venv, which the first command makes. It is made again only when what is to be installed changes.

PYTHON ?= python3
PIP_ARGS ?=
SECONDS ?= 600
JOBS ?= 3
RUN := .venv/bin/python
READY := .venv/.installed
DEMO_READY := .venv/.installed-for-demo

# Programs that tests start would compile farprop anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-failed test-fast docs interrupts chaos bench bench-hosts bench-scaling bench-peers clients clusters conformance sim fuzz dashboard-assets screenshots lint format clean

help:
	@echo "make demo | test [T=path] [JOBS=3] | test-failed | test-fast | docs | interrupts [ONLY=program] | chaos [ONLY=kind] [SEED=n] [MINUTES=10] | lint | format | bench | bench-hosts | bench-scaling | bench-peers | clients | clusters | conformance [ONLY=Class] [REQUIRED=1] | sim | fuzz [SECONDS=600] [TARGET=name] | dashboard-assets | screenshots | clean"

# It needs less than the tests do. Where all is installed, that will do.
demo: $(if $(wildcard $(READY)),$(READY),$(DEMO_READY))
	@$(RUN) examples/demo.py

# Most tests wait more than they compute. A path is run in one process.
test: $(READY)
	@$(RUN) -m pytest --durations=25 $(if $(T),$(T),--numprocesses=$(JOBS) --dist=worksteal)

# The tests that have failed in the last run, in one process.
test-failed: $(READY)
	@$(RUN) -m pytest --last-failed --last-failed-no-failures=none

# For while you write: the unit tests, and a few of each kind with real workers (tests/fast.txt). Under two minutes.
test-fast: $(READY)
	@$(RUN) -m pytest --numprocesses=$(JOBS) --dist=worksteal $$(grep -v '^#' tests/fast.txt)

# The site, in build/site. A warning is an error, and nothing is fetched.
docs: $(READY)
	@$(RUN) -m sphinx -W --keep-going --fresh-env --quiet --jobs 2 --doctree-dir build/doctrees docs build/site
	@echo "The site is in build/site/index.html"

interrupts: $(READY)
	@$(RUN) -m tests.interrupts $(ONLY)

chaos: $(READY)
	@$(RUN) -m tests.chaos $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES))

bench: $(READY)
	@$(RUN) -m bench
	@$(RUN) -m bench.dashboard
	@$(RUN) -m bench.imports

# Needs root's permissions and iproute2, for hosts that are network namespaces.
bench-hosts: $(READY)
	@$(RUN) -m bench.hosts

bench-scaling: $(READY)
	@$(RUN) -m bench.scaling

bench-peers: $(READY)
	@$(RUN) -m bench.peers

clients: $(READY)
	@$(RUN) -m bench.clients

# Ray and Kubeflow's packages, in a virtual environment of their own.
clusters: $(READY)
	@$(RUN) -m tests.clusters

conformance: $(READY)
	@$(RUN) -m tests.conformance $(if $(REQUIRED),--required) $(if $(ONLY),--only $(ONLY))

sim: $(READY)
	@$(RUN) -m tests.simulation --kind job --seeds 100000
	@$(RUN) -m tests.simulation --kind references --seeds 10000
	@$(RUN) -m tests.simulation --kind passes --seeds 10000
	@$(RUN) -m tests.simulation --kind groups --seeds 10000
	@$(RUN) -m tests.simulation --kind streams --seeds 10000
	@$(RUN) -m tests.simulation --kind parcels --seeds 10000
	@$(RUN) -m tests.autograd.oracle --programs 2000

# Atheris is installed when it is first wanted: it is of no use for anything else.
fuzz: $(READY)
	@$(RUN) -c 'import atheris' 2>/dev/null || $(RUN) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[fuzz]'
	@$(RUN) -m tests.fuzz --seconds $(SECONDS) $(TARGET)

# The libraries of the live page, from npm, in the versions of frontend/package-lock.json. Needs Node.js.
dashboard-assets:
	@cd frontend && npm ci --ignore-scripts --no-audit --no-fund && npm run --silent build

# The pictures of the docs. Needs chromium and pngquant.
screenshots: $(READY)
	@$(RUN) -m tests.dashboard.screenshots

lint: $(READY)
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy
	@.venv/bin/lint-imports

format: $(READY)
	@$(RUN) -m ruff check --fix-only
	@$(RUN) -m ruff format

clean:
	rm -rf .venv

# The constraints keep torch at the version that farprop is tested with.
$(READY): pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv; this happens once, and takes a while."
	@$(RUN) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

# Without bytecode, which takes most of the time, and of which the demo needs little.
$(DEMO_READY): pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv; this happens once, and takes a while."
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-compile $(PIP_ARGS) -c constraints.txt -e '.[demo]'
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("farprop needs Python 3.11 or later, and $(PYTHON) is older: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv
