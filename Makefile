# A fresh machine needs two commands, `make demo` and `make test`: each creates .venv and installs what is missing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_MODEL ?= qwen2.5-coder-1.5b-instruct-q4_k_m

# A process per core, one thread each: models this small are slower with more. Annotations are checked in the many quick
# tests, which go through every function; in the long ones the checks would take two thirds of the time.
EACH_CORE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast check docs format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## generate without and with speculation, in colour (fetches the weights once, 1.1 GB)
	$(BIN)/paceline generate $(DEMO_MODEL) @examples/demo_prompt.txt --chat --show --compare --max-tokens 224 --temperature 0

test: $(STAMP) ## every test, those on the real model included
	$(EACH_CORE) --dist loadfile -m 'not real and not slow' $(ARGS) || [ $$? -eq 5 ]  # 5: no test was chosen
	PACELINE_SHAPE_CHECKS=off $(EACH_CORE) --dist loadfile -m 'slow and not real' $(ARGS) || [ $$? -eq 5 ]
	$(BIN)/python -m pytest -m real $(ARGS) || [ $$? -eq 5 ]

test-fast: $(STAMP) ## the short run: no real model, nothing slow, annotations unchecked
	PACELINE_SHAPE_CHECKS=off $(EACH_CORE) -m 'not real and not slow' $(ARGS)

check: $(STAMP) ## format, lint, types, import directions, public names
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: $(STAMP) ## the documentation, checked strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(STAMP) ## format the code and apply the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove .venv, caches and build output (fetched weights stay)
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an install that was interrupted is taken up again by the next make. A .venv without a
# working interpreter and pip (cut short, or made by a Python that is gone) is made anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Paceline needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1 || true). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo 'installing into .venv (a few minutes the first time)'
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@
