# One-word commands. Each sets up .venv by itself and is quick the second time.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PHOTOS := .venv/lib/python3*/site-packages/sklearn/datasets/images/*.jpg
# Real weights, if you have them: make demo CHECKPOINT=CvT-13-224x224-IN-1k.pth; with a network CHECKPOINT=microsoft/cvt-13
CHECKPOINT ?=
.PHONY: demo test test-all combinations suite benchmarks sanitize fuzz matrix docs bench gpu results lint wheel clean

# What runs here; parity and speed beside Hugging Face's model on two real photographs; what these show, if
# CHECKPOINT knows; and digits, which the package's own model knows.
demo: $(INSTALLED)
	@$(BIN)/cvt bench --summary --batch-size 1 8 $(if $(CHECKPOINT),--checkpoint '$(CHECKPOINT)')
	$(if $(CHECKPOINT),@$(BIN)/cvt classify $(PHOTOS) --checkpoint '$(CHECKPOINT)')
	@$(BIN)/python -c "from cvt.tools.datasets import save_digits; save_digits('build/digits')"
	@echo; $(BIN)/cvt classify build/digits/[0-4].png --checkpoint digits --top 1

# Linters and the tests, side by side, in 5 to 20 minutes on 2 processors. The tests are
# the part of them that has every value of every parameter (tests/tiers.py). They have one more worker than processors, since
# some wait; files with few but long tests are not left to the end, as --dist loadfile would.
WORKERS := $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)
# Processes that tests start find compiled modules, even where Python may write none.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(INSTALLED)
	$(MAKE) --jobs=2 --no-print-directory lint suite
	$(MAKE) --no-print-directory benchmarks

# make test with the loops for every instruction set, then the rest: the other combinations of parameters, every kernel compiled with three versions of Triton, every call
# in the emulator of compiled kernels, several processes, ONNX, the pages of the documentation, and the sanitizers.
test-all: export CVT_KERNELS_CPU_SETS = all
test-all: export TORCH_CUDA_ARCH_LIST ?= 9.0
test-all: $(INSTALLED)
	$(BIN)/python setup.py -q build_ext --inplace
	$(MAKE) --no-print-directory test
	$(PYTEST) --dist worksteal --tier rest

# The other combinations of parameters of the tests of make test.
combinations: $(INSTALLED)
	$(PYTEST) --tier rest -m 'not sanitized and not slow'

suite: $(INSTALLED)
	$(PYTEST) --tier test

# The suites of benchmarks once, in the smallest shapes, each contender checked and not timed.
benchmarks: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest benchmarks -q --benchmark-disable -r fE

# The loops of the CPU kernels with AddressSanitizer and UBSan, which take too long for make test: after an edit in csrc/.
sanitize: $(INSTALLED)
	$(PYTEST) --dist worksteal -m sanitized

# Random calls of the operators, command lines and damaged files, other ones with another SEED: see CONTRIBUTING.md.
# make fuzz MINUTES=60 ONLY="attention linear"
MINUTES ?= 10
SEED ?= 0
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(if $(ONLY),--only $(ONLY))

# A part of the tests on other versions of torch and Python, where these can be had: make matrix ONLY="3.11-2.11 3.13-2.13".
# PyPI's torch brings CUDA along, 5 GB; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has smaller ones.
ONLY ?=
matrix:
	$(PYTHON) tests/matrix.py $(ONLY)

# On a machine with an NVIDIA GPU: commands of at most 570 seconds each; STAGE chooses some. 1 measures CvT-13 beside PyTorch
# eager and torch.compile, 2 every kernel beside its floor and every operator, 3 launch configurations, 4 other models and dtypes;
# 5 runs the tests that need a GPU and checks memory. Each leaves build/gpu/stageN.tar.gz however it ends. It takes $(PYTHON) as it
# is, with torch, triton, transformers and pytest-benchmark, and no network; RESULTS=DIR puts the JSON elsewhere. Without make:
# python3 benchmarks/run.py --stage 1
RESULTS ?= benchmarks/results
STAGE ?= 1 2 3 4 5
gpu:
	status=0; for stage in $(STAGE); do \
		$(PYTHON) benchmarks/run.py --stage $$stage --results '$(RESULTS)' || status=1; \
	done; exit $$status

# The suites on this machine's CPU, which should have nothing else to do, in about an hour; then a table of each operator and
# build/bench/operators.png. make bench ONLY=attention takes what -k of pytest selects, in less than three minutes, and leaves
# its JSON in build/bench/.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py --stage cpu $(if $(ONLY),--only '$(ONLY)' --results build/bench,--results '$(RESULTS)')

# docs/results.md and the tables of README.md from benchmarks/results/.
results: $(INSTALLED)
	$(BIN)/python -m benchmarks.report --pages

# The documentation as a site, in build/site/.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A wheel in dist/, for this Python and every processor of this kind, and a try of it in an environment of its own, which sees nothing of this folder.
wheel: $(INSTALLED)
	rm -rf build/lib* build/bdist* dist
	CVT_KERNELS_CPU_SETS=all $(BIN)/python -m build --no-isolation --wheel
	$(BIN)/python -m venv --clear build/wheel
	build/wheel/bin/pip install --quiet -c constraints.txt "$$(echo dist/*.whl)[hf]" scikit-learn
	cd build/wheel && bin/python ../../tests/project/try_installed.py

clean:
	rm -rf .venv build dist *.egg-info cvt_kernels/_C.*.so

# torch first and pinned, then the project without build isolation: an isolated build would fetch another torch.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(shell find csrc -type f)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 14) or sys.exit("Python 3.10 to 3.14 is needed, this is %d.%d; choose one with: make PYTHON=python3.12" % v)'
	@echo 'cvt-kernels: setting up .venv with PyTorch, this package and its tests'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet -c constraints.txt setuptools ninja torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
