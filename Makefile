# One command each: make run, make test. Needs make and Python 3.11 or later, nothing else.
#
#   make run ARGS="sampler=sghmc tuner=mamba_fssd budget=quick"
#   make test ARGS="tests/test_config.py -x"      (some of the tests, in one process)
#   make run PYTHON=python3.12

PYTHON ?=
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
CHECKS := $(VENV)/.checks
STUDY := $(VENV)/.study
PUBLISHED := .venv-published/.tried
SOURCES := $(wildcard mamba_cli conf experiments tests)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: run test tables figures bench ground-truth reward-study ten-models clean help

run: $(PACKAGE)  ## The first experiment of the paper, whole: tune, ground truth, evaluate
	$(BIN)/mamba-run $(or $(ARGS),model=logreg sampler=sgld tuner=mamba_ksd)

# Every check runs, whatever the others said; the last line tells which of them failed.
test: $(CHECKS)  ## Format, lint, types, import order and every test, in two workers
	@failed=""; \
	check() { echo "== $$*"; "$$@" || failed="$$failed $$(basename "$$1")"; }; \
	check $(BIN)/ruff format --check $(SOURCES); \
	check $(BIN)/ruff check $(SOURCES); \
	check $(BIN)/mypy; \
	check $(BIN)/lint-imports --no-logo; \
	check $(BIN)/python -m pytest --durations=15 $(or $(ARGS),-n 2 --dist worksteal); \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi; \
	echo "all checks passed"

QUICK ?=
# QUICK=1: toy sizes, into results/quick. make table-LR_std_estimates is one of them.
PAPER := $(BIN)/python -m experiments.paper
SIZE := $(if $(filter-out 0,$(QUICK)),--quick)

tables: $(PACKAGE)  ## The paper's nine tables: runs what is missing (hours; QUICK=1: minutes)
	$(PAPER) tables $(SIZE) $(ARGS)

figures: $(PACKAGE)  ## The paper's five figures: runs what is missing (hours; QUICK=1: minutes)
	$(PAPER) figures $(SIZE) $(ARGS)

table-%: $(PACKAGE)
	$(PAPER) tables $* $(SIZE) $(ARGS)

figure-%: $(PACKAGE)
	$(PAPER) figures $* $(SIZE) $(ARGS)

# Goes on where it was stopped, and measures again what another machine or other code measured.
# make bench QUICK=1 only sees that everything runs. ONLY="chain report" takes some of it.
BENCHMARKS := chain published scaling rewards tuning accuracy nuts report
ONLY ?= $(BENCHMARKS)
bench: $(CHECKS) $(PUBLISHED)  ## Time everything that has a speed to keep (leave the machine alone)
	@for benchmark in $(ONLY); do \
		echo "== $$benchmark"; \
		QUICK=$(QUICK) $(BIN)/python -m experiments.benchmarks.$$benchmark $(ARGS) || exit 1; \
	done

# Goes on where it was stopped. A result that is there already is made again.
ground-truth: $(PACKAGE)  ## NUTS for a model at the paper's size: make ground-truth MODEL=pmf
	$(BIN)/mamba-run model=$(or $(MODEL),logreg) 'stages=[ground_truth]' tuner=heuristic \
		ground_truth.recompute=true run_dir=results/runs/ground_truth/$(or $(MODEL),logreg) $(ARGS)

# Takes up where it was stopped. PARTS="seeds report" makes some of it, with ARGS for that part.
REWARD_STUDY := study adversarial coverage seeds comparisons report
PARTS ?= $(REWARD_STUDY)
reward-study: $(STUDY)  ## Compare the rewards with the truth (hours; QUICK=1: minutes)
	@for part in $(PARTS); do \
		echo "== $$part"; \
		$(BIN)/python -m experiments.reward_study.$$part $(SIZE) $(ARGS) || exit 1; \
	done

ten-models: $(PACKAGE)  ## Tune ten NumPyro models and compare them with NUTS: results/ten_models
	$(BIN)/python -m experiments.ten_models.check $(ARGS)

clean:  ## Remove the environment, builds and caches; results stay
	rm -rf $(VENV) .venv-published build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The environment is made afresh whenever pyproject.toml has changed. The stamp is written
# last, so that an interrupted installation is not taken for a finished one.
$(PACKAGE): pyproject.toml
	@python="$(PYTHON)"; \
	old='import sys; sys.exit(sys.version_info < (3, 11))'; \
	if [ -n "$$python" ]; then \
		"$$python" -c "$$old" || { \
			echo "PYTHON=$$python is not a Python 3.11 or later."; exit 1; }; \
	else \
		for candidate in python3 python3.13 python3.12 python3.11 python3.14 python; do \
			if "$$candidate" -c "$$old" 2>/dev/null; then python="$$candidate"; break; fi; \
		done; \
		[ -n "$$python" ] || { \
			echo "No Python 3.11 or later was found. Install one, or name it: make PYTHON=/path/to/python3.12"; \
			exit 1; }; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV) || { \
		echo "The venv module does not work here; on Debian and Ubuntu: apt install python3-venv"; \
		exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(CHECKS): $(PACKAGE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(STUDY): $(PACKAGE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[study]'
	@touch $@

# The library of the paper, which needs an older JAX. Where there is none for this Python, the
# benchmark goes on without.
$(PUBLISHED): $(PACKAGE)
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		sgmcmcjax==0.2.13 jax==0.4.26 jaxlib==0.4.26 'numpy<2' 'scipy<1.13' \
		|| { echo "SGMCMCJax cannot be installed here: it is left out."; rm -f $(@D)/bin/python; }
	@touch $@
