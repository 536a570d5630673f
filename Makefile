# make book    environment, execute every chapter, render the book
# make test    the same, and every test
# make help    all targets
PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready
WORK := .book
PAGE := _build/html/index.html
NOTEBOOKS = $(wildcard chapters/*.ipynb)
NAMED = $(or $(CHAPTERS),$(NOTEBOOKS:chapters/%.ipynb=%))
STRIP := nbstripout --keep-id --extra-keys "metadata.widgets metadata.language_info"

# Nothing here asks a model hub; an attempt fails at once instead of waiting for a network.
export HF_HUB_OFFLINE := 1
# Progress bars are for a reader who waits, not for a page.
export TQDM_DISABLE := 1
# Threads that wait sleep instead of spinning, which on a busy machine costs small models most of their time.
export OMP_WAIT_POLICY := PASSIVE
export PYDEVD_DISABLE_FILE_VALIDATION := 1
# What a test records the next one, and the book, need not record again.
export MEMLAB_CACHE := $(abspath .cache)

.PHONY: help env book figures figures-hold portable-oldest portable-avx2 serve test nightly lint stripped units standin pages bench format strip address cover clean package executed publish-executed versions

help:
	@echo "make book      make the environment, execute every chapter, render the book"
	@echo "make serve     open the rendered book in the browser"
	@echo "make test      style, stored outputs, unit tests, chapters, book, rendered pages"
	@echo "make nightly   what takes longer: slow tests, readers' edits, every chapter on two stand-in cards, all pages and views"
	@echo "make portable-oldest, make portable-avx2   units and chapters as other processors compute them"
	@echo "make lint      style of modules, notebooks and prose, stored outputs, folded cells"
	@echo "make units     the tests that need no rendered book"
	@echo "make pages     the tests of the rendered book as it stands in _build"
	@echo "make format    put modules and notebooks into style, fold cells as tagged, drop outputs"
	@echo "make figures CHAPTERS=16-planner   run chapters, write the figures in their text anew"
	@echo "make standin   execute every chapter on a stand-in for a T4, then for an H100"
	@echo "make bench     benchmarks"
	@echo "make package   wheel and source distribution, tried alone"
	@echo "make executed  after make book: its notebooks with what they printed, into _build/executed"
	@echo "make versions SET=newest   the tests with other libraries: lowest, newest, nightly, colab"
	@echo "make address URL=https://github.com/you/fork   set the repository's address everywhere"
	@echo "make cover     draw the picture of the README and the landing page anew"
	@echo "make clean     remove what was built; rm -rf $(VENV) removes the environment"

env: $(READY)

$(READY): requirements.txt pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "No $(PYTHON) here: install Python 3.11 or newer, or say make PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"$(PYTHON) is Python {v[0]}.{v[1]}: the book needs 3.11 or newer. Say make PYTHON=/path/to/python3.11")'
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

# Pages that few changes reach. `make test` renders them without running them, unless they were changed
# since the day before, when `make nightly` last ran them.
RARE := $(wildcard chapters/*-deeper.ipynb) $(wildcard chapters/accuracy.ipynb chapters/record.ipynb chapters/your-script.ipynb)
TOUCHED = $(shell git diff --name-only "$$(git rev-list -1 --before='1 day ago' HEAD)" -- chapters 2>/dev/null)
# Those that this build runs: all, or with QUICK=1 those of a push.
RUN = $(if $(QUICK),$(filter-out $(filter-out $(TOUCHED),$(RARE)),$(NOTEBOOKS)),$(NOTEBOOKS))
LEFT_OUT = $(notdir $(basename $(filter-out $(RUN),$(NOTEBOOKS))))

# A chapter is executed once, by nbmake, in a copy: a failing cell ends the build with its traceback.
# Jupyter Book then renders the copy as it is, and any warning fails. (nbmake passes over a folder named _build.)
# Figures of the text that differ in this run are rendered as they are here, and listed at the end.
book: stripped
	@rm -rf $(WORK) _build/html _build/.doctrees
	@mkdir -p $(WORK)
	@cp -R _toc.yml references.bib chapters _ext _static vendor $(WORK)
	@sed 's/execute_notebooks: force/execute_notebooks: "off"/' _config.yml > $(WORK)/_config.yml
	$(BIN)/python tools/figures.py put $(WORK)/chapters
	cd $(WORK) && $(BIN)/python -m pytest --nbmake --overwrite -n 2 --durations=20 -p no:cacheprovider $(RUN)
	$(BIN)/python tools/figures.py compare $(WORK)/chapters --left-out $(LEFT_OUT) > $(WORK)/figures.txt
	$(BIN)/python tools/drop_leftovers.py $(WORK)/chapters/*.ipynb
	$(BIN)/jupyter-book build $(WORK) --path-output . -W --keep-going --quiet
	@$(if $(LEFT_OUT),echo "Rendered without being run: $(LEFT_OUT)",:)
	@cat $(WORK)/figures.txt
	@echo
	@echo "The book is ready. Open $(abspath $(PAGE)), or say: make serve"

# Writes the figures in the text of chapters anew, of all or of those that are named, from a run.
figures: stripped
	@rm -rf $(WORK)
	@mkdir -p $(WORK)/chapters
	@cp $(NAMED:%=chapters/%.ipynb) $(WORK)/chapters
	$(BIN)/python tools/figures.py put $(WORK)/chapters
	cd $(WORK) && $(BIN)/python -m pytest --nbmake --overwrite -n 2 -p no:cacheprovider chapters
	$(BIN)/python tools/figures.py write $(WORK)/chapters chapters

serve:
	@test -f $(PAGE) || { echo "There is no book yet: make book"; exit 1; }
	$(BIN)/python -m webbrowser "file://$(abspath $(PAGE))"

test: lint
	$(MAKE) units
	$(MAKE) book QUICK=1
	$(MAKE) figures-hold
	$(MAKE) pages

# After make book: no figure of the text is out of the bounds of its kind (tools/figures.py).
figures-hold: $(READY)
	$(BIN)/python tools/figures.py check $(WORK)/chapters

# What takes longer than a push should wait: slow tests, a reader's edits, stand-in cards, all pages and views.
nightly: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not rendered" --durations=10
	$(MAKE) standin
	$(MAKE) book
	$(MAKE) figures-hold
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow tests/test_book.py

# Units and chapters as another processor computes them: bytes are the same, trainings within their tolerance.
portable-oldest: export ATEN_CPU_CAPABILITY := default
portable-oldest: export ONEDNN_MAX_CPU_ISA := SSE41
portable-oldest: export MKL_ENABLE_INSTRUCTIONS := SSE4_2
portable-oldest: export OPENBLAS_CORETYPE := Nehalem
portable-oldest: export OMP_NUM_THREADS := 1
portable-oldest: export PYTHONHASHSEED := 7
portable-avx2: export ATEN_CPU_CAPABILITY := avx2
portable-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
portable-avx2: export MKL_ENABLE_INSTRUCTIONS := AVX2
portable-avx2: export OPENBLAS_CORETYPE := Haswell
portable-avx2: export OMP_NUM_THREADS := 4
portable-oldest portable-avx2:
	$(MAKE) units
	$(MAKE) book
	$(MAKE) figures-hold

lint: stripped
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/deptry memlab
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/python tools/check_prose.py

stripped: $(READY)
	@$(if $(NOTEBOOKS),$(BIN)/$(STRIP) --verify $(NOTEBOOKS) || { echo "Chapters are stored without outputs: make strip"; exit 1; },:)
	@$(BIN)/python tools/fold_cells.py --check

# Traces that other code has kept are not asked.
units: $(READY)
	@rm -rf $(MEMLAB_CACHE)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not rendered and not slow" --durations=10

pages: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" tests/test_book.py

# Chapters on a card that stands in for a reader's (tools/standin_card.py), all of them unless some are named.
# What such a card refuses has its unit tests (tests/test_standin_card.py).
CARDS := T4 H100
CHAPTERS :=
standin: $(READY)
	@for card in $(CARDS); do $(BIN)/python tools/run_on_standin.py $$card $(CHAPTERS) || exit 1; done

bench: $(READY)
	@for file in $(sort $(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

format: $(READY) strip
	$(BIN)/python tools/fold_cells.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

strip: $(READY)
	$(if $(NOTEBOOKS),$(BIN)/$(STRIP) $(NOTEBOOKS),@:)

package: $(READY)
	@rm -rf dist
	$(BIN)/python -m build --outdir dist .
	"$(PYTHON)" tools/try_package.py dist

# What Colab and Kaggle open: the chapters as make book has run them, without the cells that serve the text.
executed: $(READY)
	@rm -rf _build/executed && mkdir -p _build/executed/chapters
	@cp $(WORK)/chapters/*.ipynb _build/executed/chapters
	$(BIN)/python tools/figures.py readers _build/executed/chapters

publish-executed:
	git switch --orphan executed
	cp -R _build/executed/chapters .
	git add chapters
	git -c user.name="$(or $(GITHUB_ACTOR),book)" -c user.email=book@users.noreply.github.com commit --quiet -m "Chapters with outputs"
	git push --force origin executed

versions:
	"$(PYTHON)" tools/try_versions.py --set $(SET)

address:
	@"$(PYTHON)" tools/set_address.py "$(URL)"

cover: $(READY)
	$(BIN)/python tools/draw_cover.py

clean:
	rm -rf _build dist $(WORK) .cache .mypy_cache .pytest_cache .ruff_cache
