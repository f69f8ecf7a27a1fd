# Every target works on a fresh machine: `make demo`, `make test`.
# More arguments: make test ARGS="-k order", make test TESTS=tests/unit/feed, make demo ARGS="--steps=100", make bench NAME=feed.
VENV := .venv/bin
NAME ?= reader
ARGS ?=
PYTEST := $(VENV)/python -m pytest -n 2 --dist loadfile

# The end-to-end tests of `make test`: the command line, a run through Ray, its feed, and killed workers.
E2E := tests/e2e/test_cli.py tests/e2e/test_end_to_end.py tests/e2e/feed tests/e2e/test_killed_workers.py
# Runs through Ray come first, while the memory of the tests that load models is still free.
TESTS ?= $(E2E) tests/unit tests/parity tests/virtual_device

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-e2e test-all fuzz audit lint bench lock clean

help:
	@echo "make setup   build .venv from requirements.lock"
	@echo "make demo    make a small dataset, fine-tune a small PI0.5 on it, evaluate it, write the report"
	@echo "make test    run unit tests, parity with LeRobot and a few end-to-end runs; seven minutes on two cores"
	@echo "make test-e2e  run the tests that make test leaves out, except the slow ones"
	@echo "make test-all  run all tests, also faults, long runs and pages in Chromium; over an hour"
	@echo "make fuzz    change files at random and read them, FUZZ_MINUTES=20"
	@echo "make audit   compare the installed packages with requirements.lock and their own hashes"
	@echo "make lint    check style, format and types"
	@echo "make bench   run one benchmark, NAME=reader"
	@echo "make lock    compile requirements.lock from pyproject.toml"
	@echo "make clean   remove .venv and the caches; runs stay"

setup:
	@sh scripts/setup.sh

demo: setup
	@$(VENV)/vlatune demo $(ARGS)

test: setup
	@$(PYTEST) $(TESTS) $(ARGS)

test-e2e: setup
	@$(PYTEST) tests $(addprefix --ignore=,$(TESTS)) $(ARGS)

# Needs Chromium for the report's pages.
test-all: setup
	@$(PYTEST) -m 'not gpu' $(ARGS)

# The same seed gives the same cases; ARGS="--seed=5000", ARGS="--case=17" for one of them with its traceback.
fuzz: setup
	@$(VENV)/python tests/fuzz/fuzz.py $(ARGS)

# Looks up advisories if pip-audit is installed; needs a network.
audit: setup
	@$(VENV)/python scripts/audit.py $(ARGS)

lint: setup
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/basedpyright

bench: setup
	@PYTHONPATH=$(CURDIR) $(VENV)/python -m benchmarks $(NAME) $(ARGS)

# Pins stay as they are where pyproject.toml still allows them; ARGS=--upgrade moves them.
lock:
	@uv=$$(sh scripts/find_uv.sh "$$(sh scripts/find_python.sh --any)") && \
	"$$uv" pip compile pyproject.toml --quiet --universal --python-version 3.12 \
		--extra s3 --extra gcs --extra cluster --extra trackers --extra dev \
		--generate-hashes --no-emit-index-url --no-header -o requirements.lock $(ARGS)

clean:
	@rm -rf .venv .uv .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
