# make verify: both real engines on this machine's CPU, 18 layouts, with the control.   make test: the tests.
# Both set .venv up first (requirements/setup.sh), which is skipped when it is already done.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
REPORT ?= build/verify.json
# Fast tests first; the parity tests start both engines.
TESTS ?= tests/contract tests/kernels tests/launcher tests/megatron tests/sglang tests/fuzz tests/parity tests/gpu
PYTEST_ARGS ?=
export PYTHON

.PHONY: help setup setup-miles verify verify-full test test-miles fuzz soak compat lint types vendor vendor-check lock compat-lock

help:
	@echo "make verify       sample on SGLang, score on Megatron in 18 layouts, compare every bit, show the control"
	@echo "make verify-full  the same on four models and with rollout TP 4"
	@echo "make test         lint, types, vendored copies, then all tests"
	@echo "make test-miles   only the tests on Miles' own code, in an environment of its own (120 MB to fetch)"
	@echo "make fuzz         10,000 spoiled files and command lines: never a traceback, never a hang"
	@echo "make soak         200 rounds of sampling, scoring, training and updating: nothing differs, nothing grows"
	@echo "make compat       the parity tests at both ends of the supported version ranges (two environments, 9 GB each)"
	@echo "make setup        only make .venv (about 9 GB, 2 minutes on a fast line; skipped when done)"
	@echo "make vendor       write the vendored copies of contract_schema into the three packages"
	@echo "make lock         resolve requirements/*.in again"

setup:
	@requirements/setup.sh

setup-miles: setup
	@requirements/miles.sh

verify: setup
	@mkdir -p $(dir $(REPORT))
	$(BIN)/miles-top verify --model tiny --matrix small --json $(REPORT)

verify-full: setup
	@mkdir -p $(dir $(REPORT))
	$(BIN)/miles-top verify --model tiny --matrix full --json $(REPORT)

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

vendor: setup
	$(BIN)/python contract_schema/vendor.py write

vendor-check: setup
	$(BIN)/python contract_schema/vendor.py check

# A test that hangs fails by itself after 15 minutes. One thread a process: the tests start several at once.
test: lint types vendor-check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout=900 --durations=15 $(PYTEST_ARGS) $(TESTS)
	$(MAKE) test-miles

# Miles' wheel carries forks of both engines, so it is kept out of .venv.
test-miles: setup-miles
	OMP_NUM_THREADS=1 .venv-miles/bin/python -m pytest --timeout=900 --durations=15 $(PYTEST_ARGS) tests/hosts

# 20 tests of 500 examples, new ones each time.
fuzz: setup
	FUZZ_EXAMPLES=500 OMP_NUM_THREADS=1 nice $(BIN)/python -m pytest -p no:cacheprovider --durations=20 $(PYTEST_ARGS) tests/fuzz

soak: setup
	@mkdir -p build
	$(BIN)/miles-top soak --rounds 200 --json build/soak.json

compat: setup
	requirements/compat.sh new
	requirements/compat.sh old

compat-lock: setup
	for end in new old; do $(BIN)/uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
	  --generate-hashes --no-annotate --custom-compile-command "make compat-lock" \
	  -o requirements/compat-$$end.lock requirements/compat-$$end.in requirements/dev.in; done

lock: setup
	$(BIN)/uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_34 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" -o requirements/cpu-0.5.17.lock requirements/engines.in requirements/dev.in
	$(BIN)/uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_34 --generate-hashes --no-annotate --no-deps \
	  --custom-compile-command "make lock" -o requirements/miles.lock requirements/miles.in
