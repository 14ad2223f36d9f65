# The one door. `make` alone says what there is.
#
# The environment is in .venv. A stamp in it says what was installed; it is installed again only when setup.py,
# pyproject.toml or constraints.txt changed. Another interpreter: `make test PYTHON=python3.12` after `make clean`.

PYTHON ?= python3
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
PACKAGE := setup.py pyproject.toml constraints.txt
SOURCES := $(shell find raysgd operators -name '*.py')
PAGES := $(shell find docs -name '*.md') docs/conf.py $(wildcard examples/notebooks/*.ipynb)

PURE := tests/test_config.py tests/core tests/compat/test_constants.py tests/compat/test_utils.py tests/data \
	$(addprefix tests/,$(addsuffix .py,engine/test_boundary engine/test_replacements engine/test_watchdog \
	storage/test_atomic_writes ray_data/test_datasets ray_data/test_rows train/test_rounds))

# Of pip's output, only what explains a wait: big downloads, builds, the unpacking. Warnings and errors are kept.
TELL := awk '/Downloading .*[0-9][0-9]\.[0-9]+ [MG]B/ { print "  pip: downloading " $$2 " " $$3 $$4; fflush() } \
	/Building wheel for/ { print "  pip: building " $$4; fflush() } \
	/^Installing collected/ { print "  pip: unpacking " NF - 3 " packages"; fflush() }'
PIP_INSTALL = set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	--constraint constraints.txt

.PHONY: help demo test quick more nightly pure sim prove jobs versions check fix docs notebooks bench gpu gpu-wheels horovod release clean
.DELETE_ON_ERROR:

help:
	@echo "make demo   train on scikit-learn's digits with 2 workers (makes an environment first)"
	@echo "make test   run every test; ARGS='-k name' picks some"
	@echo "make quick  the tests that are nearest to what you changed, about a minute; SINCE=main compares with another commit"
	@echo "make more   the tests that take longer: every page, all faults, TensorFlow, Horovod and FSDP on workers"
	@echo "make nightly  all tests, also those that take minutes, with larger numbers of cases (hours)"
	@echo "make pure   those of them that only decide, in seconds"
	@echo "make sim    simulate failures in virtual time; SEEDS=2000 says how many schedules of them, SEED=17 shows one"
	@echo "make prove  run what proves the promises, in ten to twenty minutes: build/prove.html has the figures"
	@echo "make jobs   submit a real job to Ray's job server, in an environment that has one"
	@echo "make versions  run the tests that depend on them with the oldest and the newest Python, torch and Ray (downloads several GB)"
	@echo "make check  lint, format, types, layers, pages, docs"
	@echo "make fix    repair lint and format where that is mechanical"
	@echo "make docs   build the documentation into docs/_build/html"
	@echo "make notebooks  execute the notebooks of examples/notebooks, and store their outputs in them"
	@echo "make bench  measure raysgd and its peers, and put the figures into the documentation; ARGS=--quick takes a look"
	@echo "make gpu    measure raysgd on this machine's GPUs, in 8 minutes; ARGS='--phases B,C' picks some, ARGS='--minutes 4' shortens"
	@echo "make gpu-wheels  make what a machine with a GPU, but without a network and Ray, needs for that (41 MiB)"
	@echo "make horovod  build Horovod for the installed torch, and install it (once; the wheel is kept in your cache folder)"
	@echo "make release  build the wheel and test it, as a trial: nothing is published"
	@echo "make clean  remove everything made here, the environment too"

demo: $(VENV)/demo.stamp
	@$(BIN)/python -m raysgd.demo

# Two processes at a time, as most tests wait for processes half of their time. ARGS="-n 0 ..." makes it one, for a debugger.
test: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -q -n 2 $(ARGS)

quick: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -q -n 2 $$($(BIN)/python tools/quick.py $(SINCE)) $(ARGS)

more: $(VENV)/dev.stamp
	@RAYSGD_TIER=more $(BIN)/python -m pytest -q -n 2 $(ARGS)

nightly: $(VENV)/dev.stamp
	@RAYSGD_TIER=nightly $(BIN)/python -m pytest -q -n 2 --timeout 3600 $(ARGS)

# No process is started in these.
pure: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -q $(PURE)

# SEED=17 shows all that happens in one.
sim: $(VENV)/dev.stamp
	@PYTHONPATH=. $(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),2000) --first $(or $(FIRST),0) \
		$(addprefix --seed ,$(SEED)) $(addprefix --processes ,$(PROCESSES)) $(ARGS)

prove: $(VENV)/dev.stamp
	@$(BIN)/python tools/prove.py

# The job server is installed in an environment of its own: with it, each cluster of the tests would start a dashboard.
jobs: $(VENV)/jobs.stamp
	@RAYSGD_TIER=nightly $(BIN)/python -m pytest -q tests/workers/test_jobs.py

# The interpreters must be installed. ARGS=oldest or ARGS=newest picks one combination.
versions:
	@$(PYTHON) tools/try_versions.py $(ARGS)

check: $(VENV)/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/check_code.py
	@$(BIN)/python tools/wrap.py --check
	@$(BIN)/python tools/check_pages.py
	@$(MAKE) --no-print-directory docs

fix: $(VENV)/dev.stamp
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python tools/wrap.py

docs: docs/_build/stamp

docs/_build/stamp: $(VENV)/dev.stamp $(PAGES) $(SOURCES)
	@echo "Building the documentation in docs/_build/html"
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@touch $@

notebooks: $(VENV)/dev.stamp
	@$(BIN)/python tools/execute_notebooks.py $(or $(ARGS),examples/notebooks/*.ipynb)

bench: $(VENV)/bench.stamp
	@$(BIN)/python examples/benchmarks/bench.py $(ARGS)

gpu: $(VENV)/dev.stamp
	@$(BIN)/python -m tools.gpu.run $(ARGS)

# Once, where there is a network: .gpu/ travels with the repository, and then `python3 -m tools.gpu.run` needs no make.
gpu-wheels: $(VENV)/dev.stamp
	@$(BIN)/python -m tools.gpu.carry $(ARGS)

horovod: $(VENV)/horovod.stamp

release: $(VENV)/dev.stamp
	@$(BIN)/python tools/release.py

$(VENV)/made.stamp:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("raysgd needs Python 3.10 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.11 ...")'
	@echo "Making an environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/made.stamp $(PACKAGE)
	@echo "Installing raysgd, Ray, PyTorch and scikit-learn (some hundred MB: minutes, once)"
	@$(PIP_INSTALL) --editable '.[torch]' scikit-learn | $(TELL)
	@touch $@

$(VENV)/dev.stamp: $(VENV)/made.stamp $(PACKAGE)
	@echo "Installing raysgd and all that its tests, checks and documentation need (some hundred MB: minutes, once)"
	@$(PIP_INSTALL) --editable '.[dev]' | $(TELL)
	@touch $@

$(VENV)/bench.stamp: $(VENV)/made.stamp $(PACKAGE)
	@echo "Installing raysgd and the peers that it is measured against (some hundred MB: minutes, once)"
	@$(PIP_INSTALL) --editable '.[bench]' | $(TELL)
	@touch $@

$(VENV)/horovod.stamp: $(VENV)/dev.stamp tools/build_horovod.py
	@$(PIP_INSTALL) --editable '.[horovod]' | $(TELL)
	@$(BIN)/python tools/build_horovod.py
	@touch $@

$(VENV)/jobs.stamp: $(VENV)/dev.stamp
	@$(BIN)/python -m venv $(VENV)/jobs
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(VENV)/jobs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/raysgd-tests.pth"
	@$(VENV)/jobs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'ray[default]'
	@touch $@

clean:
	rm -rf $(VENV) .gpu build dist *.egg-info docs/_build docs/api .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
