#!/usr/bin/env bash
# All that is to be run on a machine with a CUDA device, in under eight minutes, with what is installed there and no network: Python,
# Cython, a C compiler, torch, cuda-bindings, numba, safetensors, pytest, pytest-timeout, transformers.
#
#   OUT=results bash bench/device.sh            device.log, one JSON file a section, and device.md, the tables
#
# PYTHON, TRACES (folder of routing traces), BUDGET (seconds). Each section has a limit of its own and writes what it has measured as it
# goes: one that fails or takes too long does not cost the others. ARGS="--device cpu --scale small" tries the script without a device.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$(mktemp -d)}
OUT=$(mkdir -p "$OUT" && cd "$OUT" && pwd)
TRACES=${TRACES:-../shared/traces}
[ -d "$TRACES" ] || TRACES=shared/traces
BUDGET=${BUDGET:-470}
ARGS=${ARGS:-}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

section() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 left=$((BUDGET - SECONDS)) code=0
    shift 2
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt 10 ]; then
        echo "== $name: no time left"
        failed="$failed $name"
        return 1
    fi
    echo "== $name, from second $SECONDS, at most $limit s"
    timeout --kill-after=5 "$limit" "$@" || code=$?
    [ "$code" -eq 0 ] || { failed="$failed $name($code)"; echo "== $name: exit $code"; }
    return "$code"
}

bench() { # SECTION SECONDS
    # shellcheck disable=SC2086
    section "$1" "$2" "$PYTHON" bench/bench_device.py "$1" --traces "$TRACES" --json "$OUT/$1.json" $ARGS
}

main() {
    failed=""
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total --format=csv || true
    nproc; free -g | sed -n 2p
    section build 240 "$PYTHON" setup.py --quiet build_ext --inplace --parallel 2 || { echo "not built"; return 1; }
    section versions 60 "$PYTHON" -c 'import torch, numpy, cuda.bindings, transformers, moecache
print("torch", torch.__version__, "numpy", numpy.__version__, "cuda.bindings", cuda.bindings.__version__, "transformers", transformers.__version__)'
    local quiet=(-q -rs -p no:cacheprovider --timeout 100)
    section conformance 90 "$PYTHON" -m pytest "${quiet[@]}" tests/test_cuda_device.py
    if [ ! -d "$TRACES" ]; then
        TRACES=$(mktemp -d)
        section trace 60 "$PYTHON" bench/bench_device.py trace "$TRACES/tiny.safetensors"
    fi
    bench link 60
    bench overlap 40
    bench deepseek 150
    bench mixtral 110
    section mock-cuda 60 "$PYTHON" -m pytest "${quiet[@]}" tests/test_cuda_link*.py tests/test_cuda_bindings.py tests/test_cuda_memory.py
    [ ! -d tests/engine ] || section engine 60 "$PYTHON" -m pytest "${quiet[@]}" tests/engine -k cuda
    "$PYTHON" bench/bench_device.py report "$OUT"/{link,overlap,deepseek,mixtral}.json | tee "$OUT/device.md"
    echo "== done after $SECONDS s${failed:+; failed:$failed}"
    [ -z "$failed" ]
}

main 2>&1 | tee "$OUT/device.log"
