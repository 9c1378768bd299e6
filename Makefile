# make setup           builds .venv and installs everything but the optional extras
# make demo            trains a private model on bundled data in seconds, and reports on it
# make test            lint, format check, types and tests: what CI runs
# make test-full       the slow tests too, and the C parts under sanitizers
# make test-extras     installs Lightning, transformers, Ray, trackers and MkDocs; their tests
# make test-mutation   breaks the lines that carry the guarantee, and checks that tests notice
# make test-sanitize   the C parts under AddressSanitizer and UndefinedBehaviorSanitizer
# make dist            sdist and wheel, installed into a fresh environment and tried out
# make docs            builds the documentation into site/
# make bench           the measurements behind the figures in README and docs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(wildcard src/zetaclip/*/*.c src/zetaclip/*/*.h src/zetaclip/*.h)
export ZETACLIP_DATA ?= $(shell test -d ../shared/data && cd ../shared/data && pwd)

.PHONY: setup demo test test-full test-extras test-mutation test-sanitize dist docs \
	bench format clean

setup: $(VENV)/.ready

# torch is asked for by its exact version first: a range would bring the build with GPU packages.
$(VENV)/.ready: pyproject.toml constraints.txt setup.py $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	rm -f src/zetaclip/*/*.so # what can't be compiled must not be used from before
	$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@test $$(ls src/zetaclip/*/*.so 2>/dev/null | wc -l) -eq $(words $(filter %.c,$(SOURCES))) || \
		echo "A part in C could not be compiled. zetaclip works without, but more slowly." \
			"To see why: $(BIN)/python -m pip install -v -e ."
	touch $@

demo: setup
	$(BIN)/zetaclip train --data digits --epsilon 3 --out runs/demo --force
	$(BIN)/zetaclip report runs/demo
	@echo
	@echo "That is a linear head on fixed features that no real picture was used for, so all of ε"
	@echo "went into the head. A network from end to end, at the same ε, to compare:"
	@echo "    $(BIN)/zetaclip train --data digits --epsilon 3 --model cnn --out runs/cnn"
	@echo "Your own pictures (one folder a class) or table:"
	@echo "    $(BIN)/zetaclip train --data photos/ --epsilon 3"
	@echo "    $(BIN)/zetaclip train --data table.csv --target outcome --epsilon 3"
	@echo "What an attacker finds, and what ε means: docs/audit.md, docs/choosing-epsilon.md"

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -m "not slow" --ignore=tests/extras

test-full: setup test-sanitize
	$(BIN)/python -m pytest -n 2

test-extras: $(VENV)/.extras
	$(BIN)/python -m pytest -n 2 tests/extras
	$(BIN)/python -m pytest tests/experiments/test_ray.py tests/ranks/test_ranks_ray.py

$(VENV)/.extras: $(VENV)/.ready
	$(PIP) -c $(CONSTRAINTS) -e '.[dev,docs,lightning,transformers,ray,mlflow,wandb]'
	touch $@

test-mutation: setup
	PYTHONPATH=tests $(BIN)/python -m mutation.run

test-sanitize: setup
	PYTHONPATH=tests $(BIN)/python -m sanitize.run

dist: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python .ci/check_dist.py dist

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html; with search: python3 -m http.server --directory site"

$(VENV)/.docs: $(VENV)/.ready
	$(PIP) -c $(CONSTRAINTS) -e '.[dev,docs]'
	touch $@

bench: setup
	$(BIN)/python bench/run_all.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
