# One-word commands. Each sets up .venv by itself and is quick the second time.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test bench lint clean

# The main job on real photographs. With weights: make demo CHECKPOINT=CvT-13-224x224-IN-1k.pth
demo: $(INSTALLED)
	$(BIN)/cvt-kernels doctor
	$(BIN)/cvt-kernels bench $(if $(CHECKPOINT),--checkpoint '$(CHECKPOINT)')
	$(if $(CHECKPOINT),$(BIN)/cvt classify --checkpoint '$(CHECKPOINT)' $$($(BIN)/python -m cvt_kernels.bench))

# Everything CI runs.
test: lint
	$(BIN)/pytest
	$(BIN)/pytest benchmarks --benchmark-disable -q

# Throughput report of pytest-benchmark, kept in .benchmarks/ for --benchmark-compare.
bench: $(INSTALLED)
	$(BIN)/pytest benchmarks --benchmark-autosave

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info

# torch first and pinned, then the project without build isolation: an isolated build would fetch another torch.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 10) or sys.exit("Python 3.10 or newer is needed; this is %d.%d. Choose one: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@
