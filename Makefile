# Needs git, make and Python >= 3.11 with venv; everything else goes into .venv.
PYTHON ?= python3
ARGS ?=
JOBS ?= auto

BIN := .venv/bin
LOWEST := .venv-lowest/bin
PURE := options keys _canonical lease conflict errors
comma := ,
empty :=
space := $(empty) $(empty)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
# Stamps are made through pattern rules; without this, make would delete them.
.SECONDARY:

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

.PHONY: demo
demo: .venv/.demo ## Run the example project: a broker, workers and duplicates
	$(BIN)/python -m example_project.demo $(ARGS)

.PHONY: test
test: .venv/.tests ## Run the tests on the newest Celery and redis-py (ARGS="-k name", JOBS=4)
	$(BIN)/pytest -n $(JOBS) $(ARGS)

.PHONY: test-lowest
test-lowest: .venv-lowest/.tests ## Run the tests on the oldest supported Celery and redis-py
	$(LOWEST)/pytest -n $(JOBS) $(ARGS)

.PHONY: coverage
coverage: .venv/.tests ## Run the tests and hold the figures: 95 % of everything, 100 % of the pure modules
	$(BIN)/pytest -n $(JOBS) --cov --cov-report= $(ARGS)
	$(BIN)/coverage report --fail-under=95
	$(BIN)/coverage report --fail-under=100 --include=$(subst $(space),$(comma),$(PURE:%=celery_redislock/%.py))

.PHONY: lint
lint: .venv/.lint ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: .venv/.lint ## Mend style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: types
types: .venv/.lint ## Check types (strict)
	$(BIN)/mypy celery_redislock tests/typing
	$(BIN)/pyright --pythonpath $(BIN)/python tests/typing

.PHONY: imports
imports: .venv/.lint ## Check who imports whom
	$(BIN)/lint-imports

.PHONY: docs
docs: .venv/.docs ## Build the documentation into build/docs; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

.PHONY: check
check: lint types imports docs test ## Everything that a change must pass

.PHONY: build
build: .venv/.build ## Build wheel and sdist into dist/, and try the wheel in a clean environment
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install -qq dist/*.whl
	cd build/wheel && bin/python ../../.ci/smoke.py

.PHONY: clean
clean: ## Remove everything that make and the tools have made
	rm -rf .venv .venv-lowest build dist .coverage* .hypothesis .*_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per dependency group, so that `make demo` need not install what only `make docs` wants.
.venv/.%: .venv/pip pyproject.toml requirements/newest.txt requirements/tools.txt
	@echo "$(@D): installing the $* group"
	@$(BIN)/python -m pip install -qq -c requirements/newest.txt -c requirements/tools.txt -e '.[hiredis,testing]' --group $*
	@touch $@

# Without hiredis: redis-py's own parser wants testing too.
.venv-lowest/.%: .venv-lowest/pip pyproject.toml requirements/lowest.txt requirements/tools.txt
	@echo "$(@D): installing the $* group"
	@$(LOWEST)/python -m pip install -qq -c requirements/lowest.txt -c requirements/tools.txt -e '.[testing]' --group $*
	@touch $@

# Dependency groups need a pip newer than the one that comes with Python 3.11.
%/pip:
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install -qq -U 'pip>=25.1'
	@touch $@
