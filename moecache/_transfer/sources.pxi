# Where the bytes of every source lie: as people hand it over, checked, and laid out as C records.


@dataclass(frozen=True, eq=False)
class Sources:
    """Where the bytes of every source lie and where in a slot they go. Source number = global expert number.

    Attributes
    ----------
    segment_start : int64[n + 1]
        Source ``i`` consists of the segments ``segment_start[i]`` to ``segment_start[i + 1] - 1``.
    segment_file : int32[S]
        Index into `files`, or -1: host memory.
    segment_source : uint64[S]
        Byte offset in the file, or host address.
    segment_nbytes : int64[S]
    segment_region : int32[S]
        Region of the destination.
    segment_offset : int64[S]
        Byte offset inside the slot's engine of that region.
    files
        Paths of the files.
    stamps
        For each file what it was when its contents were looked at (inode, bytes, time of modification in ns); none:
        what it is when the engine is made. Bytes of a file that is not that any more are never used.
    tensors, tensor_address
        The tensors that own the host memory, kept as long as the engine is open, and uint64[n], where each lay.
    segment_tensor : int32[S]
        Which of them a segment lies in, -1: none. A segment whose tensor has moved is not copied.
    name_of
        What messages call a source, by its number.
    """

    segment_start: object
    segment_file: object
    segment_source: object
    segment_nbytes: object
    segment_region: object
    segment_offset: object
    files: tuple = ()
    stamps: tuple = ()
    tensors: tuple = ()
    tensor_address: object = None
    segment_tensor: object = None
    name_of: object = "source {}".format

    def __reduce__(self):
        refuse_copy(self)


cdef void fill_regions(_Handle handle, region_address, region_stride) except *:
    """Lay out where each region begins, and how far it is from one slot to the next."""
    cdef EngineState* state = &handle.state
    cdef uint64_t[::1] address = np.ascontiguousarray(region_address, dtype=np.uint64)
    cdef uint64_t[::1] stride = np.ascontiguousarray(region_stride, dtype=np.int64).view(np.uint64)
    cdef Py_ssize_t i
    if address.shape[0] != stride.shape[0]:
        raise ValueError("region_address and region_stride must have one entry per region")
    state.region_address = <uint64_t*> allocate(address.shape[0], sizeof(uint64_t))
    state.region_stride = <uint64_t*> allocate(address.shape[0], sizeof(uint64_t))
    for i in range(address.shape[0]):
        state.region_address[i] = address[i]
        state.region_stride[i] = stride[i]
    handle.regions_count = <int32_t> address.shape[0]


cdef void fill_slots(_Handle handle, complete) except *:
    """Make a record for each slot that the caller's array has an entry of."""
    cdef EngineState* state = &handle.state
    cdef int32_t[::1] slots = complete
    handle.complete = complete
    state.complete = &slots[0] if slots.shape[0] else NULL
    state.slots = <Slot*> allocate(slots.shape[0], sizeof(Slot))
    state.heap = <int32_t*> allocate(slots.shape[0], sizeof(int32_t))
    state.slots_count = <int32_t> slots.shape[0]


cdef void fill_segments(_Handle handle, sources) except *:
    """Check the sources and lay them out as C records, each source's segments in the order of the file."""
    cdef EngineState* state = &handle.state
    start = np.ascontiguousarray(sources.segment_start, dtype=np.int64)
    columns = [np.ascontiguousarray(getattr(sources, "segment_" + name), dtype=dtype)
               for name, dtype in (("file", np.int32), ("source", np.uint64), ("nbytes", np.int64),
                                   ("region", np.int32), ("offset", np.int64))]
    total = start[len(start) - 1] if len(start) else -1
    if total < 0 or start[0] != 0 or np.any(np.diff(start) < 0) or any(len(column) != total for column in columns):
        raise ValueError("segment_start must rise from 0 to the length that all segment arrays share")
    number = np.repeat(np.arange(len(start) - 1), np.diff(start))
    order = np.lexsort((columns[1], columns[0], number))
    order = order[columns[2][order] > 0]
    cdef int32_t[::1] file = columns[0][order]
    cdef uint64_t[::1] source = columns[1][order]
    cdef int64_t[::1] nbytes = columns[2][order]
    cdef int32_t[::1] region = columns[3][order]
    cdef int64_t[::1] offset = columns[4][order]
    cdef int64_t[::1] first = np.searchsorted(number[order], np.arange(len(start)))
    if np.any(columns[2] < 0):
        raise ValueError("segment_nbytes must not be negative")
    if len(order) and not (0 <= min(region) and max(region) < handle.regions_count and max(file) < len(sources.files)):
        raise ValueError(f"a segment names a region outside 0..{handle.regions_count - 1} or a file outside the "
                         f"{len(sources.files)} given")
    state.segments = <Segment*> allocate(len(order), sizeof(Segment))
    state.segment_start = <int64_t*> allocate(len(start), sizeof(int64_t))
    cdef Py_ssize_t i
    for i in range(file.shape[0]):
        state.segments[i] = Segment(file=file[i], region=region[i], source=source[i], nbytes=nbytes[i],
                                    offset=<uint64_t> offset[i])
    for i in range(first.shape[0]):
        state.segment_start[i] = first[i]


cdef void keep_tensors(_Handle handle, sources) except *:
    """Note where the tensors lie that own the sources' memory."""
    start = np.ascontiguousarray(sources.segment_start, dtype=np.int64)
    of = np.ascontiguousarray(sources.segment_tensor, dtype=np.int32)
    address = np.ascontiguousarray(sources.tensor_address, dtype=np.uint64)
    if len(of) != start[len(start) - 1] or len(address) != len(sources.tensors) or of.max(initial=-1) >= len(address):
        raise ValueError(f"segment_tensor and tensor_address do not fit the {len(sources.tensors)} tensors and the segments")
    handle.where = [tensor.data_ptr for tensor in sources.tensors]
    handle.seen = np.zeros(len(address), np.int64)
    handle.tensor_start, handle.tensor_of, handle.tensor_address = start, of, address


cdef object find_moved(_Handle handle, const int32_t[:, ::1] fetch, const int32_t[:, ::1] prefetch):
    """Rows of sources whose tensor does not lie any more where it did, or None."""
    cdef const int32_t[:, ::1] rows
    cdef int64_t k
    cdef int32_t number
    cdef Py_ssize_t i
    found = None
    handle.submission += 1
    for rows in (fetch, prefetch):
        for i in range(0 if rows is None else rows.shape[0]):
            for k in range(handle.tensor_start[rows[i, 0]], handle.tensor_start[rows[i, 0] + 1]):
                number = handle.tensor_of[k]
                # The experts of a layer mostly lie in one tensor.
                if number < 0 or handle.seen[number] == handle.submission:
                    continue
                if <uint64_t> handle.where[number]() == handle.tensor_address[number]:
                    handle.seen[number] = handle.submission
                    continue
                found = (found or []) + [(rows[i, 0], rows[i, 1], rows[i, 2])]
                break
    return None if found is None else np.array(found, np.int32)
