# Two commands from a bare clone:  make train  and  make test.  The first call of each installs into .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check format docs docs-check benchmark conformance examples clean

train: .venv/.run
	$(BIN)/unisono train digits

test: .venv/.dev
	$(BIN)/python -m pytest -q -n 2 -m "not launches"
	$(BIN)/python -m pytest -q -m launches

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

docs-check: .venv/.dev
	$(BIN)/python docs/commands.py

benchmark: .venv/.dev
	$(BIN)/python benchmarks/allreduce_on_one_node/run.py

conformance: .venv/.dev
	$(BIN)/python conformance/run.py

examples: .venv/.dev .venv/.examples
	UNISONO_EXAMPLES=all $(BIN)/python -m pytest -q tests/examples

clean:
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "unisono needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.run: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpich]'
	@touch $@

.venv/.dev: .venv/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpich,dev]'
	@touch $@

.venv/.examples: .venv/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mpich,examples]'
	@touch $@
