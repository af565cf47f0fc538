# Copies between host memory, and how large a chunk they are best made in.


cdef enum:
    STREAM_BYTES = 1 << 20      # a chunk from here on is more than the core that reads it next would find in its cache


cdef inline void copy_bytes(Mover* mover, Chunk* chunk, uint64_t target, const void* source, uint64_t nbytes) noexcept nogil:
    """Copy one piece of a chunk, or a part of one, past the caches where the chunk is large."""
    if chunk.nbytes >= STREAM_BYTES:
        moe_copy(mover.way, <void*> target, source, <size_t> nbytes)
    else:
        memcpy(<void*> target, source, <size_t> nbytes)


cdef void decode(Chunk* chunk, const unsigned char** streams) noexcept nogil:
    cdef Recipe* recipe = chunk.packed.recipe
    recipe.decode(streams, recipe.numbers, recipe.table, chunk.first_row, chunk.rows, <unsigned char*> chunk.target[0])


cdef int host_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef const unsigned char* streams[MAX_STREAMS]
    cdef int32_t i
    if chunk.packed != NULL:
        for i in range(chunk.pieces):
            streams[i] = <const unsigned char*> chunk.source[i]
        decode(chunk, streams)
        return 0
    for i in range(chunk.pieces):
        copy_bytes(mover, chunk, chunk.target[i], <void*> chunk.source[i], chunk.length[i])
    return 0


cdef class HostLink(_Link):
    """Copies host memory to host memory."""

    def __init__(self):
        self.link.copy = host_copy
        self.link.file_chunk = 0


def time_copies(Py_ssize_t nbytes, int rounds):
    """Seconds that one copy between cold buffers takes this thread, by way; the best of so many rounds."""
    cdef double best[MOE_WAYS]
    cdef char* source = <char*> allocate(nbytes, 1)
    cdef char* target = NULL
    try:
        target = <char*> allocate(nbytes, 1)
        with nogil:
            memset(source, 1, nbytes)
            memset(target, 2, nbytes)
            moe_time_ways(best, target, source, nbytes, rounds)
        return [best[way] for way in range(MOE_WAYS)]
    finally:
        free(source)
        free(target)


cdef void choose_chunks(_Handle handle, bint files, chunk_bytes) except *:
    """Set the size of chunks, and the way in which they are copied between host memory; None: what suits the link."""
    cdef EngineState* state = &handle.state
    state.chunk_bytes = copying.CHUNK_NBYTES
    if not state.link.asynchronous:
        choice = copying.settle(time_copies)
        state.way = copying.WAYS.index(choice.way)
        # Reads of files are best in large chunks, whatever is best for memory.
        if not files:
            state.chunk_bytes = choice.chunk_nbytes
    if chunk_bytes is not None:
        state.chunk_bytes = chunk_bytes
