# Every target makes the virtual environment if it is missing, installs from constraints.txt and builds.
# PYTHON chooses the interpreter of a new environment: make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := hf,plot,metrics,cli,tables,dev

INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
PEERS := $(VENV)/.bench-peers
NATIVE := $(foreach kind,pyx pxd pxi h,$(wildcard moecache/*.$(kind) moecache/*/*.$(kind)))

.DELETE_ON_ERROR:
.PHONY: help install demo test matrix test-processors sanitize soak interrupts fuzz bench lint format wheel clean distclean

# Of `make soak` in all; of `make fuzz` for each target.
SECONDS ?= 1800
FUZZ_SECONDS ?= 600
# Processes of `make test`, at most; as many as there are processors otherwise.
WORKERS ?= 4

help:
	@echo "make demo    text from the tiny model, three quarters of its experts on disk, checked against the resident model"
	@echo "make test    the tests, WORKERS=$(WORKERS) processes at most, with short forms of the four that follow"
	@echo "make matrix  every model family in every way of loading and running; writes docs/guide/models.md"
	@echo "make test-processors    the parity tests with each instruction set that MKL, oneDNN and torch can be held to"
	@echo "make sanitize    the compiled modules under gcc's address, undefined behaviour and thread sanitizers"
	@echo "make soak    SECONDS=$(SECONDS) of everything at once: threads, interrupts, resizes, failing copies, forks; nothing may grow"
	@echo "make interrupts  100,000 interrupts, 1,000 resizes and 200 kills at random moments"
	@echo "make fuzz    FUZZ_SECONDS=$(FUZZ_SECONDS) of damaged files for each reader of files"
	@echo "make bench   matcher and route() latency, in pytest-benchmark tables"
	@echo "make lint    ruff, mypy, cython-lint"
	@echo "make format  what ruff can put right by itself"
	@echo "make wheel   an sdist and a wheel in dist/"
	@echo "make clean   remove what was built; distclean removes the virtual environment too"

install: $(BUILT)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt setuptools Cython
	$(PIP) install --quiet -c constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	touch $@

$(BUILT): $(INSTALLED) $(NATIVE) setup.py setup.cfg
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(PEERS): $(INSTALLED)
	$(PIP) install --quiet -c constraints.txt --no-build-isolation --editable '.[bench]'
	touch $@

demo: $(BUILT)
	$(BIN)/python examples/decode.py --capacity 0.25 --bank disk --check

# A file's tests stay in one process: what they share is made once.
test: $(BUILT)
	$(BIN)/python -m pytest -n auto --maxprocesses $(WORKERS) --dist loadfile

matrix: $(BUILT)
	OMP_NUM_THREADS=1 $(BIN)/python tests/matrix.py

# Values that are tried one by one; what each library would choose by itself is what `make test` runs.
PROCESSORS := MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=SSE41 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=default

test-processors: $(BUILT)
	for setting in $(PROCESSORS); do \
		echo "$$setting"; env OMP_NUM_THREADS=1 $$setting $(BIN)/python -m pytest -q -m parity tests/test_alignment.py tests/test_hf_parity.py || exit 1; \
	done

sanitize: $(BUILT)
	$(BIN)/python tests/sanitize.py address -q
	$(BIN)/python tests/sanitize.py thread -q

soak: $(BUILT)
	$(BIN)/python tests/soak/soak.py --seconds $(SECONDS)

interrupts: $(BUILT)
	$(BIN)/python tests/soak/interrupts.py --count 100000
	$(BIN)/python tests/soak/resizes.py --count 1000
	MOECACHE_KILLS=200 $(BIN)/python -m pytest -q tests/test_persistence_kills.py -k kills_at_random_moments --timeout 3600

fuzz: $(BUILT)
	MOECACHE_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -q tests/fuzz

bench: $(BUILT) $(PEERS)
	@# A BLAS kernel forced from outside would slow the scans that the matcher is compared with.
	env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE $(BIN)/python -m pytest bench --benchmark-only -o python_files='bench_*.py' \
		--benchmark-columns=min,median,mean,rounds --benchmark-sort=min

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint moecache

format: $(BUILT)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(BUILT)
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf build dist *.egg-info moecache/*.so moecache/*.c .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -f $(INSTALLED) $(BUILT) $(PEERS)
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
