# Every target starts from nothing and can be run again. On a fresh machine: `make demo`, `make test`.
# More arguments: make test ARGS="-k order", make demo ARGS="--steps=100", make bench NAME=feed.
VENV := .venv/bin
NAME ?= reader
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test browser-test fuzz audit lint bench lock clean

help:
	@echo "make setup   build .venv from requirements.lock"
	@echo "make demo    make a small dataset, fine-tune a small PI0.5 on it, evaluate it, write the report"
	@echo "make test    run the tests"
	@echo "make browser-test  run the tests of the report's pages in Chromium"
	@echo "make fuzz    change files at random and read them, FUZZ_MINUTES=20"
	@echo "make audit   hold the installed packages against requirements.lock and their own hashes"
	@echo "make lint    check style, format and types"
	@echo "make bench   run one benchmark, NAME=reader"
	@echo "make lock    compile requirements.lock from pyproject.toml"
	@echo "make clean   remove .venv and the caches; runs stay"

setup:
	@sh scripts/setup.sh

demo: setup
	@$(VENV)/vlatune demo $(ARGS)

# Three processes, one of which has all tests that share a Ray cluster (tests/conftest.py): what waits leaves its core to the others. ARGS="-n 0" runs all in one.
test: setup
	@$(VENV)/python -m pytest -n 3 --no-loadscope-reorder $(ARGS)

# Fails where no browser is found: CONTRIBUTING.md has the reason why `make test` leaves them out.
browser-test: setup
	@$(VENV)/python -m pytest -n 0 -m browser tests/report $(ARGS)

# The same seed gives the same cases; ARGS="--seed=5000", ARGS="--case=17" for one of them with its traceback.
fuzz: setup
	@$(VENV)/python tests/fuzz/fuzz.py $(ARGS)

# Advisories are looked up only where pip-audit is installed, and need a network.
audit: setup
	@$(VENV)/python scripts/audit.py $(ARGS)

lint: setup
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/basedpyright

bench: setup
	@$(VENV)/vlatune bench $(NAME) $(ARGS)

# Pins stay as they are where pyproject.toml still allows them; ARGS=--upgrade moves them.
lock:
	@uv=$$(sh scripts/find_uv.sh "$$(sh scripts/find_python.sh --any)") && \
	"$$uv" pip compile pyproject.toml --quiet --universal --python-version 3.12 \
		--extra s3 --extra gcs --extra trackers --extra dev \
		--generate-hashes --no-emit-index-url --no-header -o requirements.lock $(ARGS)

clean:
	@rm -rf .venv .uv .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
