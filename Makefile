# What people run: `make demo`, `make test`, `make fuzz N=10000`.
# Environments are made on first use and kept; `make clean` removes them.

PYTHON ?= python3
WORKERS ?= 2
# How many programs `make fuzz` draws.
N ?= 1000
# A checkout of jax at the version installed, for `make jax-suite`.
JAX ?= $(error make jax-suite JAX=checkout: a checkout of jax at the version installed)
VENV := .venv
NEWEST_VENV := .venv-newest
# An installed extra is a stamp in its environment, so that a second run installs nothing.
INSTALLED := $(VENV)/.installed
NEWEST_INSTALLED := $(NEWEST_VENV)/.installed-test
# mypy reads packages where they are imported from: this tree of links looks as the installed package does.
AS_INSTALLED := build/as_installed
PYTEST := -m pytest -n $(WORKERS)

.PHONY: demo test test-newest fuzz jax-suite lint bench clean $(AS_INSTALLED)

demo: $(INSTALLED)-examples
	$(VENV)/bin/python examples/train_bytes.py $(ARGS)

test: $(INSTALLED)-test
	JAX_PLATFORMS=cpu $(VENV)/bin/python $(PYTEST) $(ARGS)

# Fewer programs are drawn: `make test` has drawn them all.
test-newest: $(NEWEST_INSTALLED)
	@$(NEWEST_VENV)/bin/python -c "import jax, sys; print('jax', jax.__version__, 'on Python', sys.version)"
	JAX_PLATFORMS=cpu MOE_XLA_GENERATED=3 $(NEWEST_VENV)/bin/python $(PYTEST) $(ARGS)

fuzz: $(INSTALLED)-test
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m tests.generated $(N) $(ARGS)

jax-suite: $(INSTALLED)-test
	$(VENV)/bin/python -m tests.jax_suite $(JAX) --workers $(WORKERS) $(ARGS)

lint: $(INSTALLED)-lint $(AS_INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	MYPYPATH=$(AS_INSTALLED) $(VENV)/bin/mypy -p moe_xla

bench: $(INSTALLED)-examples
	$(VENV)/bin/python -m moe_xla bench $(ARGS)

clean:
	rm -rf $(VENV) $(NEWEST_VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(INSTALLED)-%: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable '.[$*]'
	@touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(NEWEST_INSTALLED): pyproject.toml
	$$(.ci/newest-python) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[test]'
	@touch $@

$(AS_INSTALLED):
	@rm -rf $@ && mkdir -p $@/moe_xla
	@ln -s $(CURDIR)/moe_xla/* $@/moe_xla
	@ln -sfn $(CURDIR)/passes $(CURDIR)/ffi -t $@/moe_xla
