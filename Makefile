# make demo, make test: each does all of its own set-up first; the second run skips it.
#
#   VENV=path      the environment (default .venv); one that exists already is installed into
#   PYTHON=python  the Python that makes the environment, 3.11 to 3.13 (default: the first that fits)
#   JOBS=n         tests side by side (default 2), one thread each
#   ARGS="..."     passed on, for example  make test ARGS="-k sampler"  or  make demo ARGS="--smoke"

VENV ?= .venv
PYTHON ?=
ARGS ?=
JOBS ?= 2
PIP_ARGS ?=
DIST ?= dist
LEARN2LEARN_PIP_ARGS ?=

BIN := $(VENV)/bin
# The name holds the checkout: an environment shared by two checkouts is set up again when the other one uses it.
STAMP := $(VENV)/.metapretrain-$(shell pwd | cksum | cut -d' ' -f1)
DOCS_STAMP := $(STAMP)-docs

.PHONY: help setup demo test reliability lint types release docs screenshot clean

help:
	@echo "make demo     supervised, prototypical and SimCLR pretraining side by side on digits (3 minutes)"
	@echo "make test     the tests"
	@echo "make reliability  kills, damaged files, odd options and data, hostile models (3 minutes)"
	@echo "make lint     ruff"
	@echo "make types    mypy"
	@echo "make release  the wheel and the source distribution, checked, in dist/ (DIST=folder for another)"
	@echo "make docs     the documentation site, in build/site"
	@echo "make screenshot  what TensorBoard shows of the demo, into docs/figures (needs Chromium)"
	@echo "make clean    remove the environment that make made and all build and cache folders"

setup: $(STAMP)

$(STAMP): setup.py
	@PIP_ARGS="$(PIP_ARGS)" LEARN2LEARN_PIP_ARGS="$(LEARN2LEARN_PIP_ARGS)" \
		sh .ci/setup-env.sh "$(VENV)" "$(STAMP)" "$(PYTHON)"

demo: $(STAMP)
	@"$(BIN)/metapretrain" demo $(ARGS)

test: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$(BIN)/python" -m pytest -n $(JOBS) --dist worksteal $(ARGS)

reliability: $(STAMP)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$(BIN)/python" -m pytest -n $(JOBS) --dist worksteal -m "" tests/reliability $(ARGS)

lint: $(STAMP)
	@"$(BIN)/python" -m ruff check $(ARGS) .
	@"$(BIN)/python" -m ruff format --check -q .

types: $(STAMP)
	@"$(BIN)/python" -m mypy $(ARGS)

release: $(STAMP)
	@rm -f "$(DIST)"/metapretrain-*
	@"$(BIN)/python" -m build --outdir "$(DIST)" . >/dev/null
	@"$(BIN)/python" -m twine check --strict "$(DIST)"/metapretrain-*

docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --strict --quiet $(ARGS)
	@echo "open build/site/index.html"

$(DOCS_STAMP): $(STAMP)
	@"$(BIN)/python" -m pip install -qq --no-warn-conflicts $(PIP_ARGS) -e '.[docs]'
	@touch "$(DOCS_STAMP)"

screenshot: demo
	@"$(BIN)/python" docs/screenshot.py runs/demo/digits-demo --tab scalars --size 1120,680 --out docs/figures/tensorboard.png

clean:
	@sh .ci/clean.sh "$(VENV)"
