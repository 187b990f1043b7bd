# Each target creates .venv once and uses it again; it installs anew only when pyproject.toml or constraints.txt changed.
#   make setup    everything for work on the project        make test     all tests
#   make demo     base install, then the main job           make check    format, lint, types
#   make figures  figures/out from run folders              make bench    the side-by-side benchmarks

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PINS   := pyproject.toml constraints.txt
# `pip install .` puts a copy of the package beside the checkout, and the copy would be run and tested in its place. Every
# target that means the checkout puts the link to it back first.
LINK   := $(BIN)/python -c 'import importlib.metadata as m, json, sys; \
    about = json.loads(m.distribution("kvnotes-interp").read_text("direct_url.json") or "{}"); \
    sys.exit(not about.get("dir_info", {}).get("editable"))' 2>/dev/null || $(INSTALL) --no-deps -e .

# The demo: one derived family, whose conclusion sits in the notes, and one verbatim family, which is read from the field.
DEMO_MODEL := smollm2-135m
DEMO_TASKS := pronoun capital
DEMO_N     ?= 32

# Silences a warning about forks; the tokenizers here are fast enough without threads.
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test check format figures bench clean
.DELETE_ON_ERROR:

setup: $(VENV)/.dev

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'Python >= 3.11 is needed, and "$(PYTHON)" is $(shell $(PYTHON) --version 2>&1).' \
	         'Name another one: make PYTHON=python3.12' >&2; exit 2; }
	@echo 'Creating $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: $(VENV)/.created $(PINS)
	@echo 'Installing the package ...'
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo 'Installing the development tools ...'
	@$(INSTALL) -e '.[dev]'
	@touch $@

demo: $(VENV)/.base
	@$(LINK)
	@for task in $(DEMO_TASKS); do \
	    set -- patch --model $(DEMO_MODEL) --task $$task --n $(DEMO_N) --out runs/$$task; \
	    if [ -e runs/$$task ]; then set -- "$$@" --resume; fi; \
	    echo "$$ kvprobe $$*"; $(BIN)/kvprobe "$$@" || exit $$?; \
	done

# One process per core with one thread each: the models of the tests are too small to share a matrix product.
test: $(VENV)/.dev
	@$(LINK)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

figures: $(VENV)/.dev
	@$(LINK)
	$(BIN)/python -m figures $(ARGS)

bench: $(VENV)/.dev
	@$(LINK)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis figures/out benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
