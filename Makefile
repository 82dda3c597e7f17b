# From a bare clone: python3 (>= 3.9, with its headers and venv), g++ and make. Everything else goes into .venv.
PYTHON ?= python3
VENV   ?= .venv
NP     ?= 2
JOBS   ?= $(shell nproc)
# Of test-fuzz, all targets together.
SECONDS ?= 120
FUZZ_SEED ?= 1

BIN     := $(abspath $(VENV))/bin
STAMPS  := $(VENV)/stamps
SOURCES := $(shell find csrc -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)
TOOLS   := $(wildcard tools/*.py)
# Randomized addresses confuse older ThreadSanitizers; not every container lets us turn them off.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

export PATH := $(BIN):$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CMAKE_GENERATOR := Ninja

.PHONY: help build train test test-all test-core test-python test-python-all test-faults test-fuzz test-programs
.PHONY: test-torch test-sanitizers test-sanitizers-short clean distclean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: $(STAMPS)/package ## virtual environment, Horovod, this package in editable form

train: build ## trains the digits example on NP ranks (2)
	$(BIN)/horovodrun -np $(NP) $(BIN)/python examples/digits.py

test: test-core test-python ## core tests (ctest), then Python tests (pytest) with a smoke test of each slow group

# `make lint` where there is one.
test-all: test-core test-python-all test-sanitizers-short test-fuzz $(shell sed -n 's/^\(lint\):.*/\1/p' Makefile) ## everything that CI runs

test-core: $(STAMPS)/requirements ## core tests only
	$(call core_tests,build/core,-DCMAKE_BUILD_TYPE=RelWithDebInfo)

# Where the installed torch is, and how it was built.
TORCH_FACTS = $(shell $(BIN)/python -c 'import os, torch; print(f"-DPOSEIDON_TORCH_DIR={os.path.dirname(torch.__file__)}", \
  f"-DPOSEIDON_TORCH_VERSION={torch.__version__} -DPOSEIDON_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")')
TORCH_TESTS = -DPOSEIDON_BUILD_TORCH_TESTS=ON $(TORCH_FACTS)

test-torch: $(STAMPS)/requirements ## csrc/torch from C++: sessions on ranks that are threads, without Python and Horovod
	cmake -S . -B build/torch -DPOSEIDON_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo $(TORCH_TESTS)
	cmake --build build/torch --target torch_tests
	ctest --test-dir build/torch --output-on-failure --no-tests=error -R '^torch_'

test-python: build ## Python tests only, without the slow ones (tests/harness/slow.py); PYTEST_ARGS are passed on
	cd tests && $(BIN)/python -m harness.native
	$(BIN)/python -m pytest tests -m "not faults and not slow" $(PYTEST_ARGS)

test-python-all: build ## all Python tests
	cd tests && $(BIN)/python -m harness.native
	$(BIN)/python -m pytest tests $(PYTEST_ARGS)

test-faults: export POSEIDON_FAULTS_JSON ?= bench/results/faults.json
test-faults: build ## every row of docs/reliability.md, with and without us (20 minutes), and the page from them
	$(BIN)/python -m pytest tests/test_faults.py tests/test_reliability_page.py -m faults $(PYTEST_ARGS)
	$(BIN)/python tools/reliability.py

test-programs: export POSEIDON_PROGRAMS ?= 5000
test-programs: build ## random training programs on ranks as threads against one process; POSEIDON_PROGRAMS of them, POSEIDON_PROGRAMS_SEED
	cd tests && $(BIN)/python -m harness.native
	$(BIN)/python -m pytest tests/test_programs.py -s $(PYTEST_ARGS)

test-sanitizers: $(STAMPS)/requirements ## tests of core and csrc/torch under ThreadSanitizer, then AddressSanitizer and UBSan
	$(call core_tests,build/tsan,-DCMAKE_BUILD_TYPE=Debug -DPOSEIDON_SANITIZE=thread $(TORCH_TESTS),$(NO_ASLR))
	$(call core_tests,build/asan,-DCMAKE_BUILD_TYPE=Debug -DPOSEIDON_SANITIZE=address$(comma)undefined $(TORCH_TESTS))

# What has threads. The decoders run under AddressSanitizer in test-fuzz.
SHORT := engine|exchange|ordered_sender|census|scalar_sum|gather_bytes|local_transport|first_failure
test-sanitizers-short: $(STAMPS)/requirements ## those core tests that have threads, under both
	$(call short_tests,build/tsan,-DPOSEIDON_SANITIZE=thread,$(NO_ASLR))
	$(call short_tests,build/asan,-DPOSEIDON_SANITIZE=address$(comma)undefined)

test-fuzz: build ## mutated inputs for everything that is decoded, SECONDS (120) in all, with sanitizers
	cmake -S . -B build/fuzz -DPOSEIDON_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPOSEIDON_FUZZ_COVERAGE=ON \
	  -DPOSEIDON_SANITIZE=address$(comma)undefined$(comma)float-cast-overflow
	cmake --build build/fuzz --target core_fuzz
	cd build/fuzz && ./core_fuzz all --seconds $$(($(SECONDS) * 7 / 8)) --seed $(FUZZ_SEED) --corpus ../../csrc/tests/fuzz/corpus
	POSEIDON_FUZZ_SECONDS=$$(($(SECONDS) / 8)) $(BIN)/python -m pytest tests/test_config.py -k fuzzed -q

.PHONY: lint format
lint: $(STAMPS)/lint ## layout, lint rules, types and locks: clang-format, ruff, mypy, clang-tidy
	$(BIN)/clang-format --dry-run -Werror $(filter %.cc %.h,$(SOURCES))
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/check_locks.py

format: $(STAMPS)/lint ## lays out all sources
	$(BIN)/clang-format -i $(filter %.cc %.h,$(SOURCES))
	$(BIN)/ruff format .

clean: ## removes what was built here; keeps .venv and the Horovod wheel in .cache
	rm -rf build dist *.egg-info poseidon_hvd/_C*.so $(STAMPS)/package

distclean: clean ## removes .venv and .cache too
	rm -rf $(VENV) .cache

comma := ,
# $(call core_tests,folder,options,command before ctest)
define core_tests
	cmake -S . -B $(1) -DPOSEIDON_BUILD_TESTS=ON $(2)
	cmake --build $(1)
	$(3) ctest --test-dir $(1) --output-on-failure --no-tests=error
endef

# $(call short_tests,folder,options,command before ctest)
define short_tests
	cmake -S . -B $(1) -DPOSEIDON_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Debug $(2)
	cmake --build $(1) --target $(shell ls csrc/tests/core | sed -nE 's/^(.*($(SHORT))_test)\.cc/\1/p')
	$(3) ctest --test-dir $(1) --output-on-failure --no-tests=error -R '$(SHORT)'
endef

$(STAMPS)/requirements: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/lint: $(STAMPS)/requirements requirements-lint.txt
	$(BIN)/python -m pip install --quiet -r requirements-lint.txt
	touch $@

$(STAMPS)/horovod: $(STAMPS)/requirements $(TOOLS)
	$(BIN)/python tools/build_horovod.py --jobs $(JOBS)
	touch $@

$(STAMPS)/package: $(STAMPS)/horovod setup.py pyproject.toml CMakeLists.txt $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@
