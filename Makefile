# Two commands are all a newcomer needs: `make demo` and `make test`. Both install what they need first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export RAY_AUTH_MODE ?= disabled

.PHONY: setup demo test test-clusters test-computing test-long check bench clean

setup: $(VENV)/.installed

# torch comes first and by name: a bare range would pull the newest build with gigabytes of CUDA packages. torchvision is
# for scripts that tests run as jobs, beside everything else: its compiled part fits no build of torch without CUDA. Where
# there is none for this Python these tests do without.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/for-scripts torchvision==0.16.2 \
		|| echo "no torchvision 0.16.2 for this Python: tests that run scripts with it do without"
	touch $@

demo: setup
	$(BIN)/shoal demo $(DEMO_ARGS)

# Tests of whole clusters wait half of their time; all others compute in what is left, and give way. What fails runs once
# more, as a machine that others share may stand still for longer than anybody waits; the summary names it (RERUN) all the
# same.
COMPUTING := tests/deploy tests/planner tests/recovery tests/service tests/workers
TESTS := -m "not long" --reruns 1 -raR
test: setup
	PYTHON=$(BIN)/python sh tests/browser/install.sh
	PYTHON=$(BIN)/python sh tests/helm/install.sh
	PYTHON=$(BIN)/python sh tests/deploy/install.sh
ifeq ($(TEST_ARGS),)
	$(MAKE) --jobs=2 test-clusters test-computing
else
	$(BIN)/python -m pytest $(TEST_ARGS) -m "not long"
endif

test-clusters:
	$(BIN)/python -m pytest $(TESTS) $(COMPUTING:%=--ignore=%)

test-computing:
	nice -n 5 $(BIN)/python -m pytest $(TESTS) -n 2 --dist loadfile $(COMPUTING)

test-long: setup
	PYTHON=$(BIN)/python sh tests/browser/install.sh
	PYTHON=$(BIN)/python sh tests/helm/install.sh
	PYTHON=$(BIN)/python sh tests/deploy/install.sh
	$(BIN)/python -m pytest --within 73 $(TEST_ARGS) -m "long"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
