# make bench   sets up what is needed, then runs the main job: `gdn bench`
# make install the set-up alone
# make test    the same set-up, then the tests that take no longer than they must: minutes on two cores
# make test ROOM=report   those of one room: tests/report, or tests/worker/judge for ROOM=judge
# make check   lint, types and the tests of what changed since main: about a minute
# make lint    ruff and the types; make types: mypy alone
# make test-all   those that are marked slow, too
# make test-lowest   `make test` with the lowest versions that pyproject.toml allows, in .ci/venvs
# make verify-results   whether README's tables are what the committed records say
# make test-gpu   the tests that need a GPU, on a machine that has one; CALLS=1000 calls each launch path so often, on a busy GPU
# make attacks   wrong algos and cheats, and what stops each: tests/attacks
# make screens   writes tests/screens/*.txt anew; read the diff
# make coverage   how much of the quick rooms their tests reach
# make dist-check   builds the wheels and the sdist, and tries them in a new environment
# make docs    the documentation as a site, to be opened at site/index.html
# make pages   writes the generated parts of docs/cli.md, records.md, checking.md and results/leaders.md again
# make compile_commands.json   where the kernels' headers lie, for editors
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# Python compiles what it imports, when it does: all 15,000 files take two minutes
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)

CALLS ?= 20
# a file is one process's work; conftest.py puts the large ones first
XDIST := -n auto --dist loadfile --no-loadscope-reorder

# the tests of ROOM; all without one
TESTS = $(if $(ROOM),$(or $(firstword $(wildcard tests/$(ROOM) tests/worker/$(ROOM))),$(error no tests/$(ROOM))))
COVERED := catalog records report
QUICK := -m "not slow and not records"

.PHONY: install bench test test-all test-lowest test-gpu check screens attacks which-python verify-results docs pages \
	lint types coverage dist-check clean

bench: $(STAMP)
	$(VENV)/bin/gdn bench
	@echo "next: '. $(VENV)/bin/activate', then 'gdn new my-v1 --from cpp-v1' begins a kernel of yours"

install: $(STAMP)

test: $(STAMP)
	$(VENV)/bin/python -m pytest $(XDIST) $(QUICK) $(TESTS)

test-all: $(STAMP)
	$(VENV)/bin/python -m pytest $(XDIST) -m "not records" $(TESTS)

check: lint
	$(VENV)/bin/python -m pytest $(XDIST) $(QUICK) $$($(VENV)/bin/python .ci/changed.py)

test-lowest:
	@test -n "$(PYTHON)" || { echo "gdn needs Python 3.10 to 3.13; set PYTHON=..." >&2; exit 3; }
	@mkdir -p .ci/venvs
	@$(PYTHON) -m venv .ci/venvs/lowest
	.ci/venvs/lowest/bin/python .ci/requirements.py lowest > .ci/venvs/lowest.txt
	PIP_CONSTRAINT=$(CURDIR)/.ci/venvs/lowest.txt $(MAKE) test VENV=.ci/venvs/lowest

which-python:
	@echo $(PYTHON)

verify-results: $(STAMP)
	$(VENV)/bin/python -m pytest -m records

test-gpu: $(STAMP)
	$(VENV)/bin/python -m pytest -m gpu -n auto --dist worksteal --calls $(CALLS)

# in one process each: what commands and workers run in others is not counted. All tests with it would take 15 % longer
coverage: $(STAMP)
	$(VENV)/bin/python -m pytest $(XDIST) $(QUICK) $(COVERED:%=--cov=src/gdn_cli/%) $(COVERED:%=tests/%)

screens: $(STAMP)
	-$(VENV)/bin/python -m pytest -q -n auto $(QUICK) --write-screens
	git diff --stat tests/screens

attacks: $(STAMP)
	$(VENV)/bin/python tests/attacks/run.py

docs: $(STAMP)
	test -x $(VENV)/bin/mkdocs || $(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

pages: $(STAMP)
	$(VENV)/bin/python docs/generate.py

compile_commands.json: $(STAMP) algos/_cuda/compile_commands.py
	$(VENV)/bin/python algos/_cuda/compile_commands.py > $@

lint: $(STAMP) types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(STAMP)
	$(VENV)/bin/mypy

dist-check:
	@test -n "$(PYTHON)" || { echo "gdn needs Python 3.10 to 3.13; set PYTHON=..." >&2; exit 3; }
	.ci/dist $(PYTHON)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "gdn needs Python 3.10 to 3.13; set PYTHON=..." >&2; exit 3; }
	@echo "installing gdn and PyTorch into $(VENV): several GB, some minutes, once"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[dev]'
	@rm -f $(VENV)/.installed-*; touch $@

clean:
	rm -rf .venv .ci/venvs site
