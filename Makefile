# make install   .venv with everything
# make demo      a real search on a real model, then training with the plan it wrote
# make check     lint, types, and the tests that take less than a second each: 3 minutes
# make test      every check but the slow tests: 7 minutes
# make test-slow the tests above 5 s: real searches, clusters, faults
# make test-next the suite against the newest releases of torch and others, and what broke
# make bench     overhead, honesty and layers, as the README has them
# make gpu       device tests and twenty checks of a card, with the python3 at hand; installs nothing

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
.DEFAULT_GOAL := install
.PHONY: install demo lint check test test-slow test-next bench gpu clean

install: $(INSTALLED)

# torch comes first and by itself: its pin decides which build everything else resolves against.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed, but $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	@touch $@

demo: install
	cd examples/digits_cnn && ../../$(BIN)/autotune search model.py --budget 100% --trials 8 --trial-time 2s --max-time 200s
	$(BIN)/autotune show examples/digits_cnn/plan.yaml
	cd examples/digits_cnn && ../../$(BIN)/autotune run plan.yaml -- ../../$(BIN)/python train.py

PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(PYTEST) -m "not alone and not slow and not medium"

test: lint
	$(PYTEST) -m "not alone and not slow"
	$(BIN)/pytest -q -m alone

test-slow: install
	$(PYTEST) -m "slow and not alone"

test-next:
	$(PYTHON) -m benchmarks.next $(if $(TESTS),-- $(TESTS))

bench: install
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.honesty
	$(BIN)/python -m benchmarks.honesty --reference
	$(BIN)/python -m benchmarks.layers

gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu:
	$(PYTHON) -m pytest -q -m gpu
	$(PYTHON) -m benchmarks.gpu

clean:
	rm -rf .venv build dist *.egg-info
