# make demo   builds, converts a small trained model, verifies every stage, asks it questions; no torch, no GPU
# make test   installs what the tests need (system packages too, where it may) and runs them
# make check  lint and the disassembly check
# make golden regenerates golden/ (STAGE=name for one)
# make ptx    compiles csrc/sm20 into the PTX that ships, after every change there
# make soak   everything, with gigabyte conversions and many more examples
PYTHON ?= python3
CSRC := $(shell find csrc -name '*.c' -o -name '*.h')
BUILD := pyproject.toml fermi_engine/kernels/_build.py $(CSRC)
DEMO_VENV := .venv-demo
VENV := .venv
export PYTHON
export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test check golden ptx soak mutate system clean

help:
	@sed -n 's/^# //p' Makefile | head -7

demo: $(DEMO_VENV)/.ready
	$(DEMO_VENV)/bin/python tools/demo.py

test: system $(VENV)/.ready
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile

check: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/python tools/check_isa.py

golden: $(VENV)/.ready
	$(VENV)/bin/python tools/make_golden.py $(if $(STAGE),--stage $(STAGE))

ptx: system $(VENV)/.ready
	$(VENV)/bin/python tools/check_sm20.py --write

mutate: $(VENV)/.ready
	$(VENV)/bin/python tools/mutate.py

soak: export FERMI_SOAK = 1
soak: system $(VENV)/.ready
	$(VENV)/bin/python -m pytest

system:
	@sh tools/system_packages.sh

$(DEMO_VENV)/.ready: $(BUILD)
	@sh tools/system_packages.sh compiler
	test -x $(DEMO_VENV)/bin/python || $(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(DEMO_VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.ready: $(BUILD)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable . --group dev
	touch $@

clean:
	rm -rf build $(DEMO_VENV) $(VENV) demo fermi_engine/kernels/_cpu*.so *.egg-info
