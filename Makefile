# `make demo`, `make test`, `make docs` and `make bench` each set up everything they need on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test docs bench sanitize gpu-check dist lint format clean

demo: $(VENV)/.demo
	$(BIN)/python -m experiments.demo

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

# The site, warnings as errors: open build/site/index.html.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.report --output docs/results/performance.md

# The native kernels' tests on a build that finds bad addresses and undefined behaviour.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g
sanitize: $(VENV)/.dev
	rm -rf build/sanitized build/sanitized-objects
	CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" $(BIN)/python setup.py --quiet build --build-lib build/sanitized \
		--build-temp build/sanitized-objects
	LD_PRELOAD="$$($${CC:-gcc} -print-file-name=libasan.so) $$($${CC:-gcc} -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitized $(BIN)/python -m pytest tests/optim/test_native.py -k "not install"

# All that can be known of the GPU kernels without a GPU: some minutes, most of them compiling.
gpu-check: $(VENV)/.dev
	$(BIN)/python -m pytest tests/optim/test_triton.py tests/benchmarks/test_triton_kernels.py
	$(BIN)/python -m benchmarks.triton_kernels --output docs/results/triton_kernels.md

# What a release uploads, and whether an index would take it; see RELEASING.md.
dist: $(VENV)/.release
	rm -rf build dist src/*.egg-info  # else setuptools also packs what was once packed
	CFLAGS="$$CFLAGS -g0" $(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/abi3audit --strict --summary dist/*.whl

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --no-progress --quiet .github

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info

$(VENV)/.core: pyproject.toml setup.py constraints.txt $(wildcard src/baoc/optim/kernels/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(PIP) --editable .
	touch $@

$(VENV)/.demo: $(VENV)/.core
	$(PIP) --editable ".[cli,plot]"
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --group dev --editable ".[experiments]"
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) --group docs
	touch $@

$(VENV)/.release: $(VENV)/.core
	$(PIP) --group release
	touch $@

$(VENV)/.bench: $(VENV)/.core
	$(PIP) --group bench --editable ".[models]"
	touch $@
