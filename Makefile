# `make demo` and `make test` do all the set-up themselves. torch comes pinned from constraints.txt: a range would pull
# gigabytes of CUDA packages on a CPU machine, and torchvision or torchaudio would break the CPU build.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

GPU_PYTHON ?= python3
NAME ?= h200
FUZZ ?= requests --count 20000

# Tests marked slow: no, all, or one share of them, as 3/8.
SLOW ?= no

.PHONY: demo test test-all sanitize fuzz lint wheel clean gpu-suite gpu-rehearsal

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV): downloads 240 MB of packages (torch for CPUs: 190 MB), takes a minute or two, 1 GB on disk."
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --editable '.[test,train,datasets,tensorboard,kernels,report,serve,bench,ray]'
	touch $@

$(VENV)/.lint: $(VENV)/.base
	$(PIP) --editable '.[lint]'
	touch $@

demo: $(VENV)/.base
	@echo "Two commands with the model of the repository, about a minute; nothing more is downloaded. The first of them"
	@echo "compiles the CPU kernels, once on this machine, in up to half a minute of a processor more."
	$(BIN)/foretoken generate models/tinycode -s draft_model --max-tokens 96 --seed 1 --temperature 0.8 \
		--prompt 'def read_config(path):'
	$(BIN)/foretoken bench models/tinycode -s ngram -s draft_model --num-prompts 8 --max-tokens 128

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal --slow $(SLOW)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal --slow all

# A wheel for Linux on x86-64, with the kernels compiled for every generation of processors. Needs a C++ compiler.
wheel: $(BIN)/python
	@echo "Builds a wheel into dist/: compiles the kernels six times, about two minutes of a processor, without further messages."
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

# The native kernels under GCC's AddressSanitizer and UndefinedBehaviorSanitizer, over the tests that run them. Python
# itself is not built with them: so they are loaded first, with libstdc++ whose exceptions they watch, and leaks, which
# Python has by design, are not looked for. The first finding ends the run.
sanitize: $(VENV)/.test
	FORETOKEN_SANITIZE=1 CXX=g++ ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest -p no:cacheprovider -m native --slow all tests/decoder tests/drafters tests/heads tests/models

lint: $(VENV)/.test $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python .ci/check_repository.py
	$(BIN)/python .ci/check_size.py

# `make fuzz FUZZ="threads --count 2000 --seed 7"`; targets: requests, threads, models, checkpoints, bodies.
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz $(FUZZ)

# On the GPU machine itself, with the torch that is there; writes benchmarks/results/gpu-$(NAME).{json,md}.
gpu-suite:
	FORETOKEN_TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest -o addopts= --slow all tests/kernels
	$(GPU_PYTHON) -m benchmarks.gpu_suite --out benchmarks/results/gpu-$(NAME)

gpu-rehearsal: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu_suite --out build/gpu-rehearsal --rehearse

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
