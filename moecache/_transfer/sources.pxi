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
    recipes
        How packed segments are decoded: what :class:`moecache.packed.Recipe` says.
    segment_recipe : int32[S]
        Number of the recipe of the matrix whose first stream a segment is, -1: its bytes go as they are, -2: a further stream
        of the segment before it, in whose order the streams are.
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
    recipes: tuple = ()
    segment_recipe: object = None
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
    chosen = np.full(total, -1, np.int32) if sources.segment_recipe is None else np.array(sources.segment_recipe, np.int32)
    check_recipes(sources.recipes, chosen, number, columns[2])
    # Streams stay behind the first of them, wherever they lie.
    first_stream = np.maximum.accumulate(np.where(chosen == -2, 0, np.arange(total)))
    order = np.lexsort((np.arange(total), columns[1][first_stream], columns[0][first_stream], number))
    order = order[columns[2][order] > 0]
    fill_recipes(handle, sources.recipes)
    cdef int32_t[::1] recipe = chosen[order]
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
        state.segments[i] = Segment(recipe=NULL, file=file[i], region=region[i], source=source[i], nbytes=nbytes[i],
                                    offset=<uint64_t> offset[i])
        if recipe[i] >= 0:
            state.segments[i].recipe = &state.recipes[recipe[i]]
    for i in range(first.shape[0]):
        state.segment_start[i] = first[i]


def check_recipes(recipes, chosen, number, nbytes):
    """Raise ValueError where packed segments do not follow each other as their recipes say, or hold other numbers of bytes."""
    if len(chosen) != len(number) or max(chosen, default=-1) >= len(recipes) or min(chosen, default=-1) < -2:
        raise ValueError(f"segment_recipe must have one entry per segment: the number of one of {len(recipes)} recipes, -1 or -2")
    first = np.flatnonzero(chosen >= 0)
    count = np.array([len(recipe.streams) for recipe in recipes], np.int64)[chosen[first]]
    further = int(np.count_nonzero(chosen == -2))
    for k in range(MAX_STREAMS):
        at = first[count > k] + k
        expected = np.array([recipe.nbytes(k) if k < len(recipe.streams) else 0 for recipe in recipes], np.int64)
        if len(at) and (at[len(at) - 1] >= len(chosen) or np.any(number[at] != number[at - k])
                        or (k and np.any(chosen[at] != -2))):
            raise ValueError("the first stream of a packed segment must be followed by the others, each with segment_recipe -2")
        wrong = at[nbytes[at] != expected[chosen[at - k]]]
        if len(wrong):
            raise ValueError(f"segment {wrong[0]} holds {nbytes[wrong[0]]} bytes, its recipe takes "
                             f"{expected[chosen[wrong[0] - k]]}")
        further -= len(at) if k else 0
    if further:
        raise ValueError("a segment with segment_recipe -2 is no stream of the one before it")


cdef void fill_recipes(_Handle handle, recipes) except *:
    """Lay recipes out as C records. Chunks are of so many rows that their packed bytes are those of any chunk."""
    cdef EngineState* state = &handle.state
    cdef Recipe* made
    cdef const int64_t[::1] numbers
    cdef const unsigned char[::1] table
    cdef uint64_t address
    cdef int64_t staging
    cdef Py_ssize_t i, k
    state.recipes = <Recipe*> allocate(len(recipes), sizeof(Recipe))
    for i, recipe in enumerate(recipes):
        made = &state.recipes[i]
        numbers, table, address = recipe.numbers, recipe.table, recipe.decoder
        made.decode = <Decoder> <void*> address
        made.numbers = &numbers[0]
        made.table = &table[0] if table is not None and table.shape[0] else NULL
        made.streams = <int32_t> len(recipe.streams)
        made.rows = recipe.rows
        made.chunk_rows = recipe.chunk_rows(state.chunk_bytes)
        staging = 0
        for k in range(made.streams):
            made.step[k], made.nbytes[k] = recipe.streams[k]
            staging += staged_bytes((made.chunk_rows + made.step[k] - 1) // made.step[k] * made.nbytes[k])
        state.staging_bytes = max(state.staging_bytes, staging)


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
