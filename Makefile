PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test test-slow lint bench

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade -c constraints.txt pip setuptools
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps -c constraints.txt triton
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

# two processes, of one thread each: with more they wait for each other
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/dsa-compile bench startup --lowering eager
	$(BIN)/dsa-compile bench startup --lowering inductor
	if command -v nvidia-smi > /dev/null; then \
		for kernel in attention indexer topk select; do $(BIN)/dsa-compile bench $$kernel || exit 1; done; \
	fi
