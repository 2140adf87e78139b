# make demo   what the demo needs, then accuracy, time and memory beside softmax attention (a picture in out/)
# make test   the whole environment, then every test
# make check  format, lint and types
# make docs   the site, in out/docs: warnings and broken links are errors
# make notebooks   executes the notebooks of the site anew, which always does all of it
# Each other does nothing when nothing has changed since it last succeeded; `make -B NAME` runs it all the same.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp
TESTED := $(VENV)/tested.stamp
SOURCES := $(shell find primal_attention tests examples benchmarks docs reproduction -name '*.py' -o -name '*.md' -o -name '*.ipynb') README.md CONTRIBUTING.md pyproject.toml Makefile
DEMO_INSTALLED := $(VENV)/demo.stamp
DEMO := out/demo.png
SITE := out/docs/index.html

.PHONY: demo test check format docs notebooks clean
.DELETE_ON_ERROR:
# pip compiles nothing: most modules are never imported, and imports compile and keep the others.
unexport PYTHONDONTWRITEBYTECODE
demo: $(DEMO)
	@echo "The picture is $(DEMO)."
test: $(TESTED)
	@echo "All tests passed on these sources."
docs: $(SITE)
	@echo "The first page is $(SITE)."

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(DEMO_INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[timeseries]'
	touch $@

$(INSTALLED): pyproject.toml constraints.txt tests/patching/torchvision_on_cpu.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python tests/patching/torchvision_on_cpu.py
	touch $@

$(DEMO): $(DEMO_INSTALLED) examples/demo.py $(shell find primal_attention -name '*.py')
	$(BIN)/python examples/demo.py --out $@

$(TESTED): $(INSTALLED) $(SOURCES)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
	touch $@

$(SITE): $(INSTALLED) $(SOURCES) $(wildcard docs/*.css docs/*.png reproduction/*/*/*.toml reproduction/*/*/*.csv) CHANGELOG.md
	rm -rf out/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env -c docs -d out/doctrees . out/docs

notebooks: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks]'
	$(BIN)/python docs/run_notebooks.py

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) out build dist
