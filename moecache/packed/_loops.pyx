# cython: language_level=3, boundscheck=False, wraparound=False
"""The loops of the built-in formats: their addresses, and calling one."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

cdef enum:
    MAX_STREAMS = 4

ctypedef void (*Decoder)(const unsigned char**, const int64_t*, const unsigned char*, int64_t, int64_t,
                         unsigned char*) noexcept nogil

cdef extern from "_fp8.h" nogil:
    void moe_fp8(const unsigned char**, const int64_t*, const unsigned char*, int64_t, int64_t, unsigned char*)

cdef extern from "_mxfp4.h" nogil:
    void moe_mxfp4(const unsigned char**, const int64_t*, const unsigned char*, int64_t, int64_t, unsigned char*)

FP8 = <uintptr_t> <void*> moe_fp8
MXFP4 = <uintptr_t> <void*> moe_mxfp4


def decode(recipe, addresses, uint64_t out):
    """Decode a whole matrix from streams at these addresses to another one."""
    cdef const unsigned char* streams[MAX_STREAMS]
    cdef const int64_t[::1] numbers = recipe.numbers
    cdef const unsigned char[::1] table = recipe.table
    cdef Decoder decoder = <Decoder> <void*> <uintptr_t> recipe.decoder
    cdef int64_t rows = recipe.rows
    cdef const unsigned char* values = &table[0] if table is not None and table.shape[0] else NULL
    for i in range(len(recipe.streams)):
        streams[i] = <const unsigned char*> <uintptr_t> addresses[i]
    with nogil:
        decoder(streams, &numbers[0], values, 0, rows, <unsigned char*> <uintptr_t> out)
