# Two commands: `make quickstart` sets up and trains the embedded default, `make test` sets up and passes the tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin

DEVICE ?= cuda

.PHONY: quickstart test families lint setup docs gpu-check clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m dspark_train fit --config configs/quickstart.yaml

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# What only a GPU can tell, in ten minutes at most: a table, and gpu_check.json. DEVICE=cpu runs it on tiny shapes.
gpu-check: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_check.py --device $(DEVICE)

# Every model family of the installed transformers: half a minute to two; and the table of them.
families: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m families tests/target/test_families.py
	$(BIN)/python benchmarks/families.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

setup: $(VENV)/.installed-dev

# The documentation, in site/; a broken link or a name that does not exist stops it.
docs: $(VENV)/.installed-dev
	$(call aloud,installing the documentation's tools,$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs]")
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Run a command, and say every twenty seconds that it still runs.
define aloud
	@echo "$(1)"; (while sleep 20; do echo "  … $(1)"; done) & ticker=$$!; \
	$(2); status=$$?; kill $$ticker; exit $$status
endef

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	$(call aloud,installing PyTorch into $(VENV) (half a minute to several),$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)")
	$(call aloud,installing dspark-train and what it needs (a minute or two),$(BIN)/pip install --quiet --disable-pip-version-check --editable .)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call aloud,installing the development tools,$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]")
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info src/*.egg-info
