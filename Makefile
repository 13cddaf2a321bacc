# make demo: sets everything up and trains the main example on data that needs no download.
# make test: sets everything up and runs lint and tests: every rule, optimizer and engine, in minutes.
# make test-all: the other tests: full grids, processes, kills, examples, benchmarks' scripts.
# make docs: builds the site below build/docs/site, with the tutorials run, and checks every link.
# make nightly: the tests that are too long for every time, and 500 random trainings, each sound or
# refused, which go on where they stopped.
# make parity: compares with tensorflow-privacy itself, in a second environment.
PYTHON ?= python3
PARITY_PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2
# TensorFlow leaves oneDNN out on some CPUs, and has no gradients of grouped convolutions there.
export TF_ENABLE_ONEDNN_OPTS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
export PIP_ROOT_USER_ACTION ?= ignore
# TensorFlow's C++ code logs some lines before it reads any setting: oneDNN, no CUDA, and a note on
# the lines themselves. Nobody can act on them, so they are dropped. Python's warnings and errors stay.
SHELL := bash
QUIET = 2> >(grep -vE --line-buffered \
  '^(WARNING: All log messages before absl|I0000 |[EW]0000 .*(cuda|cufft|computation_placer))' >&2)

.PHONY: demo test test-all docs lint bench nightly parity clean

$(BIN)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq -e ".[examples,test]"
	touch $@

demo: $(BIN)/ready
	@$(BIN)/python examples/train.py --optimizer=adadp --log_dir=runs/demo $(QUIET)

lint: $(BIN)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal

test: lint
	@$(PYTEST) $(QUIET)

# Tests of drawn examples are in both runs, here with more of them.
test-all: $(BIN)/ready
	@$(PYTEST) --hypothesis-profile=full -m "(extended or hypothesis) and not nightly" $(QUIET)

docs: $(BIN)/ready
	$(BIN)/python -m pip install -qq -e ".[docs]"
	@MPLBACKEND=agg $(BIN)/python docs/build.py --execute

bench: $(BIN)/ready
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.adadp_default

NIGHTLY_SEED ?= 0

nightly: $(BIN)/ready
	@$(PYTEST) -m nightly $(QUIET)
	$(BIN)/python -m verification.fuzz --models=500 --lots=10 --seed=$(NIGHTLY_SEED)

# tensorflow-privacy 0.9.0 runs on Python up to 3.11, and this package from 3.11 on.
parity: $(BIN)/ready
	@$(PARITY_PYTHON) -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" 2>/dev/null || \
	  { echo "make parity needs Python 3.11: $(PARITY_PYTHON) is not. Give PARITY_PYTHON=<path>."; exit 1; }
	$(BIN)/python -m verification.parity.compare --python=$(PARITY_PYTHON)

clean:
	rm -rf $(VENV) build dist *.egg-info runs .pytest_cache .ruff_cache .hypothesis
