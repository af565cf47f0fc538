# The files sources are read from: descriptors, of which there are few, and whether a file is still what it was.


cdef enum:
    MOST_DESCRIPTORS = 64       # of one engine; a checkpoint may have hundreds of shards


cdef void close_descriptor(Files* files, int* descriptor) noexcept nogil:
    if descriptor[0] >= 0:
        posix_close(descriptor[0])
        descriptor[0] = -1
        files.open -= 1


cdef bint close_one(Files* files) noexcept nogil:
    """Close the file that has not been used for longest; False: all are in use. With the lock held."""
    cdef File* oldest = NULL
    cdef File* file
    cdef int32_t i
    for i in range(files.count):
        file = &files.file[i]
        if file.users == 0 and (file.direct >= 0 or file.buffered >= 0) and (oldest == NULL or file.used < oldest.used):
            oldest = file
    if oldest == NULL:
        return False
    close_descriptor(files, &oldest.direct)
    close_descriptor(files, &oldest.buffered)
    return True


cdef int check_stamp(File* file, int descriptor) noexcept nogil:
    """0, FILE_CHANGED, or an errno. A write sets the time of modification before it changes the first byte, so bytes that
    were read before this says 0 are those of the stamp."""
    cdef uint64_t inode = 0
    cdef int64_t nbytes = 0, modified_ns = 0
    cdef int error = stamp_of(descriptor, &inode, &nbytes, &modified_ns)
    if error:
        return error
    if not file.stamped:
        file.inode, file.nbytes, file.modified_ns, file.stamped = inode, nbytes, modified_ns, True
    return 0 if (inode == file.inode and nbytes == file.nbytes and modified_ns == file.modified_ns) else FILE_CHANGED


cdef int open_descriptor(Files* files, File* file, int* descriptor, int flags) noexcept nogil:
    """With the lock held."""
    cdef int error
    while files.open >= MOST_DESCRIPTORS and close_one(files):
        pass
    while True:
        descriptor[0] = posix_open(file.path, O_RDONLY | O_CLOEXEC | flags)
        if descriptor[0] >= 0:
            break
        error = errno
        if error == EINTR or (error in (EMFILE, ENFILE) and close_one(files)):
            continue
        return error
    files.open += 1
    error = check_stamp(file, descriptor[0])
    if error:
        close_descriptor(files, descriptor)
    return error


cdef int check_after_read(File* file, int descriptor, int error) noexcept nogil:
    """How a read over this descriptor has ended: whatever it met, that the file has changed says more."""
    cdef int changed_error = check_stamp(file, descriptor)
    return changed_error if changed_error else error


cdef int ensure_buffered(Files* files, File* file) noexcept nogil:
    """Have a descriptor through the page cache too. With the lock held."""
    return 0 if file.buffered >= 0 else open_descriptor(files, file, &file.buffered, 0)


cdef int ensure_direct(Files* files, File* file) noexcept nogil:
    """Have a descriptor past the page cache; where the file system refuses, one through it. With the lock held."""
    cdef int error
    if file.direct >= 0:
        return 0
    error = open_descriptor(files, file, &file.direct, O_DIRECT)
    if error in (FILE_CHANGED, EMFILE, ENFILE):
        return error
    if error:
        error = ensure_buffered(files, file)      # a file that cannot be opened at all says why here
        if error == 0:
            store_release(&file.refused, 1)
        return error
    if file.align == 0:
        file.align = direct_alignment(file.direct, &file.memory_align)
        if not 1 <= file.align <= 4096:
            store_release(&file.refused, 1)
    return 0


cdef int acquire_file(Files* files, File* file, bint direct) noexcept nogil:
    """Keep a file open until `release_file`: for `direct` reads if they are not refused, through the page cache if they are."""
    cdef int error = 0
    pthread_mutex_lock(&files.lock)
    files.uses += 1
    file.used = files.uses
    file.users += 1             # before opening, or the file itself could be the one to close
    if direct and load_acquire(&file.refused) == 0:
        error = ensure_direct(files, file)
    if error == 0 and (not direct or load_acquire(&file.refused)):
        error = ensure_buffered(files, file)
    if error:
        file.users -= 1
    pthread_mutex_unlock(&files.lock)
    return error


cdef int acquire_buffered(Files* files, File* file) noexcept nogil:
    """Of a file that is kept open, have the descriptor through the page cache too."""
    cdef int error
    pthread_mutex_lock(&files.lock)
    error = ensure_buffered(files, file)
    pthread_mutex_unlock(&files.lock)
    return error


cdef void release_file(Files* files, File* file) noexcept nogil:
    pthread_mutex_lock(&files.lock)
    file.users -= 1
    pthread_mutex_unlock(&files.lock)


cdef void open_files(_Handle handle, stamps) except *:
    """Name the files and open each once, so that one that is missing or has changed is known before anything is copied."""
    cdef Files* files = &handle.state.files
    cdef File* file
    cdef bytes path
    cdef int error
    if stamps and len(stamps) != len(handle.paths):
        raise ValueError(f"{len(stamps)} stamps for {len(handle.paths)} files")
    handle.encoded = list(map(os.fsencode, handle.paths))
    files.file = <File*> allocate(len(handle.paths), sizeof(File))
    for i in range(len(handle.paths)):
        file = &files.file[i]
        path = handle.encoded[i]
        file.path = path
        file.direct = file.buffered = -1
        if stamps:
            file.inode, file.nbytes, file.modified_ns = stamps[i]
            file.stamped = True
        files.count += 1
        with nogil:
            error = acquire_file(files, file, handle.state.link.direct)
            if error == 0:
                release_file(files, file)
        if error:
            raise file_error(handle, i, error, -1)
    refused = sum(files.file[i].refused for i in range(files.count))
    if handle.state.link.direct and refused:
        logger.warning("the file system of %s refuses reads past the page cache (%d of %d files): experts are read through "
                       "it, with one more copy of each", handle.paths[0], refused, files.count)


cdef object file_error(_Handle handle, Py_ssize_t number, int fault, int64_t offset):
    """What went wrong with a file, as an exception."""
    cdef File* file = &handle.state.files.file[number]
    path = handle.paths[number]
    if fault == FILE_CHANGED:
        stamp = Stamp(file.inode, file.nbytes, file.modified_ns)
        try:
            now = Stamp.of(os.stat(path))
        except OSError:
            now = stamp
        return changed(path, stamp, now)
    if fault == END_OF_FILE:
        return OSError(EIO, f"the file has {file.nbytes} bytes, and those from {offset} on were expected too", path)
    reason = os.strerror(fault) + (f" at byte {offset}" if offset >= 0 else "")
    if fault in (EMFILE, ENFILE):
        reason = f"{os.strerror(fault)}: the process has no descriptor left for it; close files, or raise the limit (ulimit -n)"
    return TransferError(fault, reason, path)
