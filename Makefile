# Two commands are all a newcomer needs: `make demo` and `make test`. Both install what they need first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export RAY_AUTH_MODE ?= disabled

.PHONY: setup demo test test-long check bench clean

setup: $(VENV)/.installed

# torch comes first and by name: a bare range would pull the newest build with gigabytes of CUDA packages.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/shoal demo $(DEMO_ARGS)

# Plans, stores and the service keep one core busy and disturb nobody, so those tests share the cores; clusters and
# ranks have theirs alone; where one of those fails it runs once more, as a machine that others share may stand still for
# longer than anybody waits. The summary names it (RERUN) all the same.
SHARING := tests/planner tests/recovery tests/service
test: setup
	PYTHON=$(BIN)/python sh tests/browser/install.sh
ifeq ($(TEST_ARGS),)
	$(BIN)/python -m pytest -m "not long" --reruns 1 -raR $(SHARING:%=--ignore=%)
	$(BIN)/python -m pytest -m "not long" -n 2 $(SHARING)
else
	$(BIN)/python -m pytest $(TEST_ARGS) -m "not long"
endif

test-long: setup
	PYTHON=$(BIN)/python sh tests/browser/install.sh
	$(BIN)/python -m pytest $(TEST_ARGS) -m "long"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
