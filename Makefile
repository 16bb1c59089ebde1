# `make` lists the targets. Each makes its own environment in .venv first. Needed beforehand: Python
# 3.10 or later with its headers, and a C++ compiler (Inductor compiles with both).

PYTHON ?= python3
VENV ?= .venv
# A requirement such as torch==2.15.0, to install that. Empty: the torch that is there is kept, in
# .venv or beside $(PYTHON), else the newest tested one is installed (tools/environment.py). Where
# pip would bring a CUDA build that is not wanted: make TORCH='torch==2.15.0+cpu', and PyTorch's CPU
# index in PIP_EXTRA_INDEX_URL.
TORCH ?=
PIP_INSTALL = $(VENV)/bin/pip install --quiet --disable-pip-version-check

RANKS ?= 2
ifeq ($(RANKS),1)  # one rank saves activations only, so it gets a batch that has some
LIMIT ?= 208MiB
DEMO_FLAGS ?= --batch 16
endif
LIMIT ?= 112MiB
DEMO_FLAGS ?=

# Versions of torch for make compat; empty: all that are said to work.
VERSIONS ?=

.PHONY: help demo test test-all pytest lint types compat docs clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL = help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/installed  ## train a small GPT with two ranks under a memory limit (three minutes)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) \
	  examples/train_gpt.py --memory-limit $(LIMIT) --html demo-out/report.html $(DEMO_FLAGS)

# Tests that start ranks use little more than one core; on two, others run beside them.
WORKERS ?= 3

# glibc keeps freed memory: a page fault is dear on virtual machines, and a tenth of all time here.
pytest: export MALLOC_TRIM_THRESHOLD_ ?= 2000000000
pytest: export MALLOC_MMAP_THRESHOLD_ ?= 2000000000
# mypy takes one core for a minute: the tests run beside it.
test: lint  ## lint, types, and the tests that take minutes together
	$(MAKE) --jobs 2 types pytest CHOSEN='-m "not thorough"'

test-all: lint  ## lint, types and all tests, as CI runs them
	$(MAKE) --jobs 2 types pytest

pytest: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  $(CHOSEN)

compat:  ## the core of the tests on versions of torch (VERSIONS="2.11.0 2.15.0")
	$(PYTHON) tools/compat.py $(VERSIONS)

# The pages of docs/ as a site in build/site; a broken link is an error.
docs: $(VENV)/installed  ## the documentation as a site in build/site
	$(PIP_INSTALL) --editable ".[docs]"
	$(VENV)/bin/mkdocs build --strict

lint: $(VENV)/installed-dev  ## ruff and the order of imports
	$(VENV)/bin/ruff check
	$(VENV)/bin/lint-imports

types: $(VENV)/installed-dev  ## mypy
	$(VENV)/bin/mypy

$(VENV)/installed: pyproject.toml tools/check_prerequisites.py tools/environment.py
	$(PYTHON) tools/check_prerequisites.py
	$(PYTHON) tools/environment.py $(VENV) --torch "$(TORCH)"
	@echo "installing what the package needs into $(VENV), once"
	$(PIP_INSTALL) --editable ".[html]"
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing the development tools into $(VENV), once"
	$(PIP_INSTALL) --editable ".[dev]"
	touch $@

clean:  ## remove the environments
	rm -rf $(VENV) .compat
