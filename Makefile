# make demo: sets everything up and trains the main example on data that needs no download.
# make test: sets everything up and runs lint and tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: demo test lint bench clean

$(BIN)/ready: setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[examples,test]"
	touch $@

demo: $(BIN)/ready
	$(BIN)/python examples/train.py --optimizer=adadp --log_dir=runs/demo

lint: $(BIN)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

bench: $(BIN)/ready
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/adadp_default.py

clean:
	rm -rf $(VENV) build dist *.egg-info runs .pytest_cache .ruff_cache .hypothesis
