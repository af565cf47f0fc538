"""The loops over all stored requests, in every version that a machine may choose, against NumPy: one machine runs only one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

HEADERS = Path(__file__).parent.parent / "moecache" / "_decide"
WRAPPER = """
#include "_match.h"
#include "_rank.h"
ptrdiff_t place(ptrdiff_t entry) { return moe_place(entry); }
int has(int width) {
#ifdef MOE_X86
    if (width == 512) return __builtin_cpu_supports("x86-64-v4");
    if (width == 256) return __builtin_cpu_supports("x86-64-v3");
#endif
    return 0;
}
#define ARGUMENTS double *d, const uint8_t *c, ptrdiff_t s, const int32_t *g, const int32_t *w, int k, int wide, double x, ptrdiff_t n
void add_plain(ARGUMENTS) { moe_add_columns_plain(d, c, s, g, w, k, wide, x, n); }
void add(ARGUMENTS) { moe_add_columns(d, c, s, g, w, k, wide, x, n); }
#ifdef MOE_X86
void add_256(ARGUMENTS) { moe_add_columns_256(d, c, s, g, w, k, wide, x, n); }
void add_512(ARGUMENTS) { moe_add_columns_512(d, c, s, g, w, k, wide, x, n); }
#endif
ptrdiff_t reaching(int32_t *e, const double *d, const float *i, ptrdiff_t n, float l) { return moe_reaching(e, d, i, n, l); }
ptrdiff_t latest(float *b, const float *w, const int32_t *l, ptrdiff_t n, int32_t now, int32_t layers) {
    return moe_latest(b, w, l, n, now, layers);
}
"""


@pytest.fixture(scope="module", params=["dispatched", "plain"])
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("loops")
    (folder / "loops.c").write_text(WRAPPER)
    flags = ["-DMOE_PLAIN"] if request.param == "plain" else []
    subprocess.run(
        [compiler, "-O3", "-fPIC", "-shared", "-w", *flags, f"-I{HEADERS}", "loops.c", "-o", "loops.so"],
        cwd=folder,
        check=True,
    )
    library = ctypes.CDLL(str(folder / "loops.so"))
    for name in ("place", "reaching", "latest"):
        getattr(library, name).restype = ctypes.c_ssize_t
    return library


@pytest.mark.parametrize("name", ["add", "add_plain", "add_256", "add_512"])
@pytest.mark.parametrize("largest", [1, 300, 2_000_000_000])
@pytest.mark.parametrize("stored", [1, 64, 100, 1000])
def test_columns_are_added_exactly(loops: ctypes.CDLL, name: str, largest: int, stored: int) -> None:
    width = name.removeprefix("add_")
    if width.isdecimal() and not loops.has(int(width)):
        pytest.skip(f"no registers of {width} bits here, or none asked for")
    rng = np.random.default_rng(stored + largest)
    stride, k = (stored + 63) // 64 * 64, 13
    counts = rng.integers(0, 256, (40, stored))
    counts[:, 0] = 255  # the largest sums there can be
    columns = np.zeros((40, stride), np.uint8)
    places = [loops.place(ctypes.c_ssize_t(entry)) for entry in range(stored)]
    assert len(set(places)) == stored
    columns[:, places] = counts
    gids = rng.integers(0, 40, k).astype(np.int32)
    weights = rng.integers(1, largest + 1, k).astype(np.int32)
    dots = np.zeros(stride)
    dots[:stored] = before = rng.integers(0, 1000, stored)
    getattr(loops, name)(
        *(ctypes.c_void_p(array.ctypes.data) for array in (dots, columns)),
        ctypes.c_ssize_t(stride),
        *(ctypes.c_void_p(array.ctypes.data) for array in (gids, weights)),
        k,
        int(largest > 1),
        ctypes.c_double(256.0),
        ctypes.c_ssize_t(stored),
    )
    np.testing.assert_array_equal(dots[:stored], before + 256 * (weights.astype(np.int64) @ counts[gids]))


@pytest.mark.parametrize("stored", [1, 63, 200])
def test_entries_that_reach_a_score(loops: ctypes.CDLL, stored: int) -> None:
    rng = np.random.default_rng(stored)
    stride = (stored + 63) // 64 * 64
    dots, norms, found = np.zeros(stride), np.zeros(stride, np.float32), np.zeros(stride, np.int32)
    dots[:stored], norms[:stored] = rng.integers(0, 50, stored), rng.random(stored)
    scores = dots.astype(np.float32) * norms
    for least in (np.float32(1e-30), np.median(scores[:stored]), scores.max(), np.float32(1e30)):
        n = loops.reaching(
            *(ctypes.c_void_p(array.ctypes.data) for array in (found, dots, norms)),
            ctypes.c_ssize_t(stored),
            ctypes.c_float(least),
        )
        assert found[:n].tolist() == np.flatnonzero(scores >= max(least, np.float32(1e-30))).tolist()


@pytest.mark.parametrize("slots", [1, 64, 130])
def test_the_latest_of_each_block_of_slots(loops: ctypes.CDLL, slots: int) -> None:
    rng = np.random.default_rng(slots)
    wait = (rng.random(slots) * 1e4).astype(np.float32)
    wait[rng.random(slots) < 0.1] = np.inf
    layer = rng.integers(0, 7, slots).astype(np.int32)
    best = np.zeros(slots // 64 + 1, np.float32)
    for now in range(7):
        n = loops.latest(
            *(ctypes.c_void_p(array.ctypes.data) for array in (best, wait, layer)), ctypes.c_ssize_t(slots), now, 7
        )
        scores = wait + ((layer - now - 1) % 7 + 1).astype(np.float32)
        np.testing.assert_array_equal(best[:n], [scores[at : at + 64].max() for at in range(0, slots, 64)])
