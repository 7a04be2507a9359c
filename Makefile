# Everything runs in .venv; `make test` and `make demo` work on a fresh Linux machine with Python 3.11+, a C compiler and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard csrc/*)

.PHONY: demo test lint clean

demo: $(VENV)/demo.stamp
	@$(BIN)/roofline-exporter demo

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info exporter/measure/_membench*

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/dev.stamp: $(BIN)/python $(SOURCES)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,dev]'
	@touch $@
