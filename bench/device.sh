#!/usr/bin/env bash
# The one script for a machine with a CUDA device: build in place with what is installed there (Cython, torch, cuda-python; no network),
# the conformance tests on the CUDA link, the rate of the link, decode timing. Results go to the folder named by OUT, or stay on the screen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$(mktemp -d)}

nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
"$PYTHON" setup.py --quiet build_ext --inplace
export PYTHONPATH=.
"$PYTHON" -m pytest -q -p no:cacheprovider tests/test_cuda.py tests/test_cuda_device.py tests/test_engine.py | tee "$OUT/tests.txt"
"$PYTHON" bench/bench_device.py --json "$OUT/device.json" | tee "$OUT/device.txt"
