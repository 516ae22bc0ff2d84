# Two commands from a bare clone:  make train  and  make test.  The first call of each installs into .venv.
# TORCH=2.14.0 runs a command with another PyTorch, in an environment of its own.

PYTHON ?= python3
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/.constraints,constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: train test test-quick check format docs docs-check benchmark conformance examples clean

train: $(VENV)/.run
	$(BIN)/unisono train digits

# Tests share the cores: PyTorch's threads sleep while they wait. Where they poll, two tests beside each other take 1.3 to
# 1.9 times as long, and longer beside other programs.
test test-quick: export OMP_WAIT_POLICY := passive

# Tests that start no ranks wait for two fifths of their time: three of them share two cores, 5.8 minutes in place of 8.5.
# Hundreds of interpreters start: modules are compiled once, also where the environment keeps no bytecode.
test: $(VENV)/.dev
	@failed=0; unset PYTHONDONTWRITEBYTECODE; \
	$(BIN)/python -m pytest -q --durations=50 -n 3 --dist worksteal -m "not launches" || failed=1; \
	$(BIN)/python -m pytest -q --durations=50 -n 2 --dist loadfile --no-loadscope-reorder -m launches || failed=1; \
	exit $$failed

# No ranks but those of README's programs; without the folders that take longest.
test-quick: export HYPOTHESIS_PROFILE := dev
test-quick: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 -m "not launches" --ignore=tests/test_under_mpiexec.py \
	  $(foreach folder,bench benchmarks compute docs examples faults testing,--ignore=tests/$(folder))
	$(BIN)/python -m pytest -q tests/test_readme.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

docs-check: $(VENV)/.dev
	$(BIN)/python docs/commands.py

benchmark: $(VENV)/.dev
	$(BIN)/python benchmarks/allreduce_on_one_node/run.py

conformance: $(VENV)/.dev
	$(BIN)/python conformance/run.py

examples: $(VENV)/.dev $(VENV)/.examples
	UNISONO_EXAMPLES=all $(BIN)/python -m pytest -q tests/examples

clean:
	rm -rf .venv .venv-torch-*

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "unisono needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Another PyTorch needs other versions of what it names exactly.
$(VENV)/.constraints: $(VENV)/bin/python constraints.txt
	sed -E 's/^torch==.*/torch==$(TORCH)/; /^(cuda|nvidia|setuptools|sympy|triton)/d' constraints.txt > $@

$(VENV)/.run: $(VENV)/bin/python $(CONSTRAINTS) pyproject.toml hatch_build.py $(wildcard src/unisono/transports/*.[ch])
	$(PIP) -e '.[mpich]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) -e '.[mpich,dev]'
	@touch $@

$(VENV)/.examples: $(VENV)/.run
	$(PIP) -e '.[mpich,examples]'
	@touch $@
