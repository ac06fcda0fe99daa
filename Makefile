PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CONFORMANCE := .venv/.conformance
BENCH := .venv/.bench
DOCS := .venv/.docs

.PHONY: demo demo-distributed test test-all fuzz cpus matrix lint types notebooks docs conformance bench gpu clean

demo: $(READY)
	$(BIN)/python examples/digits.py

demo-distributed: $(READY)
	for name in data_parallel ddp fsdp2; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/$$name.py || exit 1; \
	done

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests --ignore=tests/conformance
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" tests/second_device
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --doctest-modules purescale

test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests --ignore=tests/conformance
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/second_device
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --doctest-modules purescale

fuzz: $(READY)
	HYPOTHESIS_PROFILE=fuzz OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m hypothesis tests --ignore=tests/conformance

# What torch and its libraries run on other processors: with fewer instructions, from a maker other
# than Intel (the last two paths of MKL), and with four threads. Where torch's own kernels or oneDNN's
# are switched, inductor is left out.
cpus: $(READY)
	for kind in ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
		MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=AVX2 MKL_CBWR=COMPATIBLE \
		"OMP_NUM_THREADS=4 MKL_DYNAMIC=FALSE"; do \
		env OMP_NUM_THREADS=1 $$kind $(BIN)/python -m pytest -n 2 -m "not slow" tests --ignore=tests/conformance || exit 1; \
	done

matrix: $(READY)
	$(BIN)/nox --no-error-on-missing-interpreters

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

notebooks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --nbmake notebooks

docs: $(DOCS)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

conformance: $(CONFORMANCE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/conformance

bench: $(BENCH)
	for name in post_backward optimizers update growth accumulate train_step floor compile ensemble memory batch_norm headroom; do \
		$(BIN)/python benchmarks/$$name.py --record || exit 1; \
	done
	$(BIN)/python benchmarks/plot.py

# With the machine's own torch: a GPU's is seldom the pinned one, and there may be no network.
gpu:
	$(PYTHON) benchmarks/gpu.py

clean:
	rm -rf .venv .nox .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "purescale needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(CONFORMANCE): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[conformance]'
	touch $@

$(BENCH): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
