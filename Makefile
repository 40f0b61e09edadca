# overlapctl: `make help` lists the targets.
VENV ?= .venv
BIN := $(VENV)/bin
SETUP := VENV=$(VENV) tools/setup_env.sh
C_FILES := $(shell find overlapctl tests bench -name '*.[ch]' -o -name '*.cu' -o -name '*.def' | grep -v '\.def$$')

.DEFAULT_GOAL := help
.PHONY: help setup tune test test-gpu check format wheel clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: ## make .venv: torch (kept if there is one), dependencies, the shim
	@$(SETUP)

tune: ## the main job: find, prove and store the best setting (GPUs if there are any, else simulated)
	@$(SETUP) plot
	@$(BIN)/overlapctl tune $(TUNE_ARGS)

test: ## all tests this machine can run
	@$(SETUP)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-gpu: ## only the tests that need a GPU; all skipped counts as failure
	@$(SETUP)
	@$(BIN)/python -m pytest tests/gpu tests/multigpu -m "gpu or multigpu" $(PYTEST_ARGS)

check: ## formatters, linters, types, import contracts
	@$(SETUP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)

format: ## format everything in place
	@$(SETUP)
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format -q .
	@$(BIN)/clang-format -i $(C_FILES)

wheel: ## build the wheel into dist/
	@$(SETUP)
	@$(BIN)/python -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation -q -w dist .

clean: ## remove everything that was built
	rm -rf build dist $(VENV) overlapctl/launch/*.so
