# `make test` and `make run` need only Python >= 3.11, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
WORKERS ?= 4

.PHONY: help test run docs lint types warm signatures pytest bench golden oracle examples format clean long

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(TOOLS)  ## install, lint, type-check, test
	$(MAKE) -j2 lint types pytest  # mypy keeps one core busy for minutes

run: $(STAMP)  ## train a small MoE in the default lab, plain and with moeyard side by side, and compare
	$(BIN)/moeyard train --lab lab-4x4 --skew mixtral-8 --mode plain,direct,all --steps 6 --out out/run

docs: $(STAMP)  ## the documents as a site in out/site; a broken link or a warning is an error
	$(PIP) -e '.[docs]'
	$(BIN)/python -m bench.commands --check || { echo "docs/commands.md is old: python -m bench.commands"; exit 1; }
	rm -rf out/gallery && $(BIN)/python -m bench.gallery
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

lint: $(TOOLS)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)  ## mypy, strict
	$(BIN)/mypy

warm: $(TOOLS)  ## compile the kernels, once for all workers and ranks of the tests
	$(BIN)/python -m compileall -q src tests bench  # hundreds of processes import them
	$(BIN)/moeyard warm

signatures: $(TOOLS)  ## rewrite kernels/signatures.json: after kernels have changed
	$(BIN)/python -m tests.signatures

pytest: warm  ## the tests alone
	$(BIN)/pytest -q -n $(WORKERS) -m "not long" --dist loadfile --no-loadscope-reorder --durations=20 tests/runtime tests/lab tests/hf tests/train tests/report tests/core

long: warm  ## the tests that take minutes on two cores, beside those of make test
	$(BIN)/pytest -q -m long tests

bench: $(TOOLS)  ## planning speed and schedule quality, measured here
	$(BIN)/python -m bench

golden: $(TOOLS)  ## rewrite the golden figures from what the code does now
	$(BIN)/python -m bench --golden

oracle: $(TOOLS)  ## every Hugging Face MoE family over 4 ranks against one process; writes the table in docs/hugging-face.md
	$(BIN)/python -m bench.hf_oracle --write

examples: $(STAMP)  ## every example on 4 ranks of this machine
	for one in pytorch_loop hf_trainer titan_loop; do \
	  OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 examples/$$one.py --steps 10 || exit 1; done

format: $(TOOLS)  ## ruff: rewrite in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist out .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What a user needs; the tools of a developer come on top, so that `make run` does not wait for them.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@$(BIN)/moeyard warm train & $(PIP) -e '.[torch,hf,lab,train]'; status=$$?; wait; exit $$status  # compile while torch is fetched
	touch $@

$(TOOLS): $(STAMP)
	@$(BIN)/moeyard warm & $(PIP) -e '.[dev]'; status=$$?; wait; exit $$status
	touch $@
