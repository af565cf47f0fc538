# Reads of files, past the page cache where the file system allows that.


cdef enum:
    PLACED_BYTES = 16384        # fewer are not worth a part of a read of their own


cdef int read_buffered(Mover* mover, File* file, uint64_t source, unsigned char* target, int64_t nbytes) noexcept nogil:
    cdef int64_t done = 0, got, ask
    while done < nbytes:
        ask = nbytes - done
        if mover.short_read:
            ask = min(ask, mover.short_read)
        got = pread(file.buffered, target + done, <size_t> ask, <off_t> (source + done))
        if got <= 0:
            if got < 0 and errno == EINTR:
                continue
            mover.fault_offset = source + done
            return END_OF_FILE if got == 0 else errno
        done += got
    return 0


cdef int read_blocks(Mover* mover, File* file, uint64_t base, iovec* parts, int count, int64_t needed) noexcept nogil:
    """Read whole blocks from here on into the parts until the bytes needed are there.

    EAGAIN: they are to be read the other way.
    """
    cdef int64_t done = 0, got
    while done < needed:
        got = preadv(file.direct, parts, count, <int64_t> base + done)
        if got < 0 and errno == EINTR:
            continue
        if mover.refuse_direct or (got < 0 and errno in (EINVAL, EOPNOTSUPP)):
            store_release(&file.refused, 1)
            return EAGAIN
        if got <= 0:
            mover.fault_offset = base + done
            return END_OF_FILE if got == 0 else errno
        if mover.short_read:
            got = min(got, mover.short_read)
        if done + got < needed:
            # The next direct read must begin on a block; less than a block is the end of the file or a whim.
            if got < file.align:
                return EAGAIN
            got &= ~(file.align - 1)
        done += got
        while count and got >= <int64_t> parts[0].iov_len:
            got -= parts[0].iov_len
            parts += 1
            count -= 1
        if count:
            parts[0].iov_base = <char*> parts[0].iov_base + got
            parts[0].iov_len -= got
    return 0


cdef int read_direct(Mover* mover, File* file, uint64_t source, unsigned char* buffer, int64_t nbytes) noexcept nogil:
    """Read the aligned blocks around the bytes into the buffer; EAGAIN: they are to be read the other way."""
    cdef int64_t mask = file.align - 1
    cdef uint64_t base = source & ~(<uint64_t> mask)
    cdef int64_t needed = <int64_t> (source - base) + nbytes
    cdef iovec part
    part.iov_base = buffer
    part.iov_len = (needed + mask) & ~mask
    return read_blocks(mover, file, base, &part, 1, needed)


cdef int read_into_place(Mover* mover, File* file, Chunk* chunk) noexcept nogil:
    """Read the blocks around the chunk: those inside a piece to where they belong, as far as the slot's address allows
    that, the others by way of the bounce buffer. EAGAIN: the chunk is to be read the other way.
    """
    cdef uint64_t mask = file.align - 1, at = chunk.source[0], cursor
    cdef uint64_t base = at & ~mask, end = at + chunk.nbytes
    cdef uint64_t first[MAX_PIECES]
    cdef uint64_t last[MAX_PIECES]
    cdef iovec parts[MAX_PARTS]
    cdef int count = 0, error
    cdef int32_t i
    cursor = base
    for i in range(chunk.pieces):
        first[i] = (at + mask) & ~mask
        last[i] = (at + chunk.length[i]) & ~mask
        if last[i] < first[i] + PLACED_BYTES or (chunk.target[i] + first[i] - at) & (file.memory_align - 1):
            last[i] = first[i] = at + chunk.length[i]       # all of the piece bounces
        else:
            if first[i] > cursor:
                parts[count].iov_base = mover.bounce + (cursor - base)
                parts[count].iov_len = first[i] - cursor
                count += 1
            parts[count].iov_base = <void*> (chunk.target[i] + first[i] - at)
            parts[count].iov_len = last[i] - first[i]
            count += 1
            cursor = last[i]
        at += chunk.length[i]
    if cursor < end:
        parts[count].iov_base = mover.bounce + (cursor - base)
        parts[count].iov_len = ((end + mask) & ~mask) - cursor
        count += 1
    error = read_blocks(mover, file, base, parts, count, <int64_t> (end - base))
    if error:
        return error
    at = chunk.source[0]
    for i in range(chunk.pieces):
        copy_bytes(mover, chunk, chunk.target[i], mover.bounce + (at - base), first[i] - at)
        copy_bytes(mover, chunk, chunk.target[i] + last[i] - at, mover.bounce + (last[i] - base), at + chunk.length[i] - last[i])
        at += chunk.length[i]
    return 0


cdef bint goes_direct(Link* link, File* file) noexcept nogil:
    """Of a file that is kept open for this link."""
    return link.direct and load_acquire(&file.refused) == 0


cdef int read_cached(Link* link, Mover* mover, File* file, Chunk* chunk, unsigned char* buffer) noexcept nogil:
    """Read a chunk of a file that is kept open through the page cache: into the buffer, or, NULL, to where it belongs."""
    cdef int64_t done = 0
    cdef int32_t i
    cdef unsigned char* target
    cdef int error = acquire_buffered(mover.files, file)
    if error:
        return error
    for i in range(chunk.pieces):
        target = <unsigned char*> chunk.target[i] if buffer == NULL else buffer + done
        error = read_buffered(mover, file, chunk.source[i], target, chunk.length[i])
        if error:
            break
        done += chunk.length[i]
    add_relaxed(&mover.counters.buffered_reads, 1)
    if link.direct:
        posix_fadvise(file.buffered, <off_t> chunk.source[0], <off_t> chunk.nbytes, POSIX_FADV_DONTNEED)
    return check_after_read(file, file.buffered, error)


cdef int read_staged(Link* link, Mover* mover, int32_t number, Chunk* chunk, unsigned char* buffer,
                     unsigned char** at) noexcept nogil:
    """Read a chunk whose pieces are neighbours in this file into a buffer, whole blocks where that goes; `at`: where its first
    byte lies there.
    """
    cdef File* file = &mover.files.file[number]
    cdef int error
    at[0] = buffer
    mover.fault_file = number
    mover.fault_offset = chunk.source[0]
    error = acquire_file(mover.files, file, link.direct)
    if error:
        return error
    error = EAGAIN
    if goes_direct(link, file):
        error = read_direct(mover, file, chunk.source[0], buffer, chunk.nbytes)
        if error != EAGAIN:
            error = check_after_read(file, file.direct, error)
            if error == 0:
                add_relaxed(&mover.counters.direct_reads, 1)
                at[0] = buffer + (chunk.source[0] & <uint64_t> (file.align - 1))
    if error == EAGAIN:
        error = read_cached(link, mover, file, chunk, buffer)
    release_file(mover.files, file)
    return error


cdef int read_kept(Mover* mover, int32_t number, uint64_t source, int64_t nbytes, unsigned char* buffer) noexcept nogil:
    """Read a few bytes through the page cache and leave them there: a page of scales serves many experts."""
    cdef File* file = &mover.files.file[number]
    cdef int error
    mover.fault_file = number
    mover.fault_offset = source
    error = acquire_file(mover.files, file, False)
    if error == 0:
        error = check_after_read(file, file.buffered, read_buffered(mover, file, source, buffer, nbytes))
        release_file(mover.files, file)
    return error


cdef inline int64_t staged_bytes(int64_t nbytes) noexcept nogil:
    """What a run of so many bytes takes in a buffer with the blocks that it lies in."""
    return (nbytes + 2 * 4096 + 4095) & ~<int64_t> 4095


cdef int decode_from_files(Link* link, Mover* mover, Chunk* chunk) noexcept nogil:
    """Read what lies in files of a chunk's streams into the bounce buffer, and decode from there."""
    cdef const unsigned char* streams[MAX_STREAMS]
    cdef unsigned char* buffer = mover.bounce
    cdef unsigned char* at = NULL
    cdef Chunk part
    cdef int32_t i
    cdef int error
    part.packed = NULL
    part.pieces = 1
    for i in range(chunk.pieces):
        streams[i] = <const unsigned char*> chunk.source[i]
        if chunk.packed[i].file < 0:
            continue
        part.source[0] = chunk.source[i]
        part.length[0] = part.nbytes = chunk.length[i]
        at = buffer
        if chunk.length[i] < PLACED_BYTES:
            error = read_kept(mover, chunk.packed[i].file, chunk.source[i], chunk.length[i], buffer)
        else:
            error = read_staged(link, mover, chunk.packed[i].file, &part, buffer, &at)
        if error:
            return error
        streams[i] = at
        buffer += staged_bytes(chunk.length[i])
    decode(chunk, streams)
    return 0


cdef bint make_bounce(Mover* mover) noexcept nogil:
    # A disk's request has so many parts at most, and scattered small pages are a part each: on huge pages a chunk is
    # one request and not several.
    cdef int64_t page = 1 << 21 if mover.bounce_bytes >= 1 << 21 else 4096
    cdef int64_t nbytes = (mover.bounce_bytes + page - 1) & ~(page - 1)
    if posix_memalign(<void**> &mover.bounce, <size_t> page, <size_t> nbytes):
        mover.bounce = NULL
        return False
    if page > 4096:
        advise_huge(mover.bounce, <size_t> nbytes)
    return True


cdef int file_copy(Link* link, Mover* mover, Chunk* chunk, int32_t ticket) noexcept nogil:
    cdef File* file
    cdef int error
    if chunk.file < 0:
        return host_copy(link, mover, chunk, ticket)
    file = &mover.files.file[chunk.file]
    mover.fault_file = chunk.file
    mover.fault_offset = chunk.source[0]
    if (link.direct or chunk.packed != NULL) and mover.bounce == NULL and not make_bounce(mover):
        return ENOMEM
    if chunk.packed != NULL:
        return decode_from_files(link, mover, chunk)
    error = acquire_file(mover.files, file, link.direct)
    if error:
        return error
    error = EAGAIN
    if goes_direct(link, file):
        error = read_into_place(mover, file, chunk)
        if error != EAGAIN:
            error = check_after_read(file, file.direct, error)
            if error == 0:
                add_relaxed(&mover.counters.direct_reads, 1)
    if error == EAGAIN:
        error = read_cached(link, mover, file, chunk, NULL)
    release_file(mover.files, file)
    return error


cdef class FileLink(_Link):
    """Reads files with ``pread``; copies segments that lie in host memory too.

    Parameters
    ----------
    direct
        Read past the page cache (``O_DIRECT``), whatever the alignment of a segment. Where the file system refuses,
        reads go through the cache, the pages are given back after each and ``buffered_reads`` counts them.
        ``False``: read through the page cache and leave the pages there.
    """

    def __init__(self, direct=True):
        self.link.copy = file_copy
        self.link.direct = direct
