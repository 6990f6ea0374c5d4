# Every target sets up what it needs in .venv, once. Python 3.11 or newer is all that has to be there.
#   make train   train a small GPT under a memory budget and show what the budget did   (ARGS="--model llama-small --budget 50%")
#                go on with the last run, for more steps where it is to be longer                 (ARGS="--resume --steps 300")
#                or with another one                                                (ARGS="--resume runs/20260131-120000")
#   make test    the tests, doctests included                                           (ARGS="tests/train -k checkpoint")
#   make lint    ruff, pyright, and that imports run one way
#   make docs    the site, into site/index.html; fails on a link or an anchor that leads nowhere
#   make dist    a wheel and an archive of the source, into dist
#   make versions  what rests on PyTorch's private interfaces, and a core of the tests, on each version that is supported
#                (PIP_ARGS="--index-url ..." for builds without CUDA)
#   make bench   the benchmarks; results go to benchmarks/results
#   make gpu     what one card answers in ten minutes; run again to go on, after a change anew    (OUT=folder, ARGS="--retry")
#                without a card the bytes of every row that needs none                     (ARGS="--no-card .venv-cuda --seconds 6000")
#                sets up nothing: with the Python of .venv, else the one that is there, which has to have PyTorch
#   make cuda-build  PyTorch's CUDA build (a wheel of 527 MB) on a machine without a card: tests/gpu and tests/cuda_build,
#                bytes by PyTorch's own allocator; no times                      (PIP_ARGS="--index-url ..." for its wheel)
#   make install only the set-up;  make clean  removes it

VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
LEAN    := $(VENV)/.training
PYTHON  ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
             $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
RUN     := runs/$(shell date +%Y%m%d-%H%M%S)
ARGS    ?=
OUT     ?= runs/gpu
# What `make versions` installs in turn, each in a folder of its own, and the tests that it runs there.
TORCHES ?= 2.11.0 2.12.0 2.13.0 2.15.0
CORE    := tests/private tests/test_interception.py tests/extensions/scopes/test_scope.py tests/run/profile \
           tests/trace/test_untouched.py tests/trace/test_tracer.py tests/parallel/test_pipelining.py \
           tests/compiled/test_api.py
PIP_ARGS ?=
# Where an environment is a symbolic link, making it anew would empty the folder that the link leads to.
define OWN
test ! -L "$(1)" || { \
	echo "$(1) is a symbolic link to $$(readlink "$(1)"), which would be emptied: remove the link, or name a folder with VENV=..." >&2; \
	exit 1; }
endef

.PHONY: install train test lint format docs dist versions bench gpu cuda-build clean

install: $(STAMP)

# Bytecode on every core: pip compiles on one. A few packages have files that are no Python of today.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "lowtide needs Python 3.11 or newer: install it, or name it with PYTHON=..." >&2; exit 1; }
	@$(call OWN,$(VENV))
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[all]'
	-@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	@touch $@ $(LEAN)

# What `make train` alone needs; nothing where everything is there already.
$(LEAN): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "lowtide needs Python 3.11 or newer: install it, or name it with PYTHON=..." >&2; exit 1; }
	@test -e $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[train]'
	@touch $@

# A new run gets a folder of its own; --resume goes on in the newest one, or in the one that ARGS names.
train: $(LEAN)
ifeq ($(filter --resume,$(ARGS)),)
	@mkdir -p $(RUN)
	$(BIN)/lowtide train --json $(RUN)/results.json --report $(RUN)/report.html --checkpoint-dir $(RUN) --checkpoint-every 50 $(ARGS)
else
	$(BIN)/lowtide train --checkpoint-every 50 $(ARGS)
endif

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Material says that it will not follow MkDocs 2; what is pinned works with 1.
docs: $(STAMP) # not --quiet: that would keep warnings from being counted by --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m build

versions:
	@for version in $(TORCHES); do \
		venv=$(VENV)-torch-$$version; \
		test -e $$venv/.installed || { \
			{ $(call OWN,$$venv); } && \
			$(PYTHON) -m venv --clear $$venv && \
			grep -v '^torch==' constraints.txt > $$venv/constraints.txt && \
			$$venv/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
				--constraint $$venv/constraints.txt "torch==$$version" --editable '.[all]' && \
			touch $$venv/.installed; } || exit 1; \
		echo "PyTorch $$version:"; \
		$$venv/bin/python -m pytest --numprocesses 2 --dist loadfile $(CORE) $(ARGS) || failed="$$failed $$version"; \
	done; \
	test -z "$$failed" || { echo "not as on the others:$$failed" >&2; exit 1; }

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

gpu:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu --out "$(OUT)" $(ARGS)

# Linux, with a C++ compiler.
cuda-build: $(STAMP)
	$(BIN)/python tests/cuda_build/environment.py $(VENV)-cuda $(PIP_ARGS)

clean:
	rm -rf $(VENV) $(VENV)-torch-* $(VENV)-cuda build dist site src/*.egg-info .pytest_cache .ruff_cache .hypothesis
