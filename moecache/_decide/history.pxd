# What finished requests did, and a running one held against them.

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t

from moecache._decide.forecast cimport ForecastWeights
from moecache._decide.gil cimport GilPolicy
from moecache._decide.layout cimport Layout
from moecache._decide.pairs cimport PairTable
from moecache._decide.reuse cimport OnlineWeights

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_rwlock_t:
        pass

cdef enum:
    MAX_BEST = 16   # best matches that can be asked for at once


cdef struct OverflowCounts:
    # Entries whose count of one expert does not fit a byte, with its high byte.
    int32_t size        # pairs
    int32_t capacity    # pairs that there is memory for
    int32_t *pair       # [size, 2]: entry, high byte


@cython.final
cdef class HistoryStore:
    cdef readonly Layout layout             # how experts are numbered
    cdef readonly GilPolicy gil             # when long work releases the GIL
    cdef readonly int32_t capacity          # requests kept at most
    cdef readonly int32_t size              # requests kept
    cdef readonly int64_t finished          # requests ever added
    cdef readonly int64_t replaced          # of them, those that took another one's entry
    cdef readonly int64_t tokens            # of all requests together
    cdef readonly object prompt_counts      # uint16 array [capacity, M]: activation matrices of prompts
    cdef readonly object decode_counts      # uint16 array [capacity, M]: of decoding
    cdef readonly object total              # int64 array [M]: tokens that used an expert, of all requests together
    cdef readonly object written            # int64 array [capacity]: `finished` when an entry was written
    cdef readonly object square             # float64 array [capacity]: sum of an entry's squared counts
    cdef readonly PairTable transitions     # which experts of the next layer followed
    cdef readonly PairTable successions     # which experts of the same layer followed for the next token
    cdef readonly OnlineWeights weights     # of the hazards
    cdef public ForecastWeights forecaster  # None without; requests begun from now on use it
    cdef Py_ssize_t stride                  # bytes from one column to the next
    cdef object _memory                     # list of arrays behind the addresses below
    cdef object _high                       # uint8 array behind `high`; empty until the first count above 255
    cdef uint8_t *columns                   # [M, stride]: low bytes of an entry's counts, in the order of moe_place
    cdef uint8_t *high                      # [M, stride]: high bytes; NULL while there are none
    cdef OverflowCounts *overflow           # [M]: the high bytes again, as lists
    cdef float *inverse_norm                # [stride]: 1 / norm of an entry's counts; 0 for none
    cdef float *row_inverse                 # [capacity, L]: 1 / sum of an entry's counts of a layer; 0 for none
    cdef double *square_of                  # [capacity]: square
    cdef int64_t *written_at                # [capacity]: written
    cdef uint16_t *prompt                   # [capacity, M]: prompt_counts
    cdef uint16_t *decode                   # [capacity, M]: decode_counts
    cdef int64_t *total_of                  # [M]: total
    cdef list matches                       # RunningMatch of each running request
    cdef pthread_rwlock_t guard             # scans without the GIL read, `add` writes; `add` has the GIL and waits for scans

    cdef inline int32_t joined(self, int32_t entry, int32_t gid) noexcept nogil:
        # What the columns hold of an entry: prompt and decode together.
        cdef Py_ssize_t at = <Py_ssize_t> entry * self.layout.num_gids + gid
        return min(<int32_t> self.prompt[at] + self.decode[at], 65535)

    cdef inline float share(self, int32_t entry, int32_t gid, int32_t layer) noexcept nogil:
        # Share of a layer's activations that an entry has at one of its experts.
        cdef Py_ssize_t at = <Py_ssize_t> entry * self.layout.num_gids + gid
        cdef int32_t stored = <int32_t> self.prompt[at] + self.decode[at]
        return stored * self.row_inverse[<Py_ssize_t> entry * self.layout.num_layers + layer]

    cdef void add_columns(self, double *dots, const int32_t *gids, const int32_t *weights, int k, bint wide) noexcept nogil
    cdef void begin_scan(self) noexcept nogil
    cdef void end_scan(self) noexcept nogil
    cdef void _add_overflow(self, double *dots, const OverflowCounts *counts, double weight) noexcept nogil
    cdef int _push_overflow(self, OverflowCounts *counts, int32_t entry, int32_t high) except -1
    cdef void _drop_overflow(self, OverflowCounts *counts, int32_t entry) noexcept nogil
    cdef int _write(self, int32_t entry, const uint16_t *prompt, const uint16_t *decode) except -1
    cdef int32_t _entry_to_replace(self, RunningMatch match, joined) except -1


@cython.final
cdef class RunningMatch:
    cdef HistoryStore store             # what it is held against
    cdef readonly object prompt_counts  # int64 array [M]: activation matrix of the prompt
    cdef readonly object decode_counts  # int64 array [M]: of decoding
    cdef readonly bint scanning         # a scan without the GIL is under way: best matches are torn
    cdef object _memory                 # list of arrays behind the addresses below
    cdef int64_t *prompt                # [M]: prompt_counts
    cdef int64_t *decode                # [M]: decode_counts
    cdef int64_t *row_sum               # [L]: activations of a layer
    cdef int64_t square                 # sum of the squared counts
    cdef double *dots                   # [stride]: dot product with each entry
    cdef int32_t *near                  # [stride]: scratch: entries that reach a score
    cdef int num_best                   # the first so many of `best` are the best; 0: not looked for since the last count
    cdef int num_found                  # so many of `best` were found last, best first
    cdef int32_t[MAX_BEST] best         # entries
    cdef double[MAX_BEST] best_key      # what orders them

    cdef inline int64_t count_of(self, int32_t gid) noexcept nogil:
        return self.prompt[gid] + self.decode[gid]

    cdef inline double _key(self, int32_t entry) noexcept nogil:
        # Orders entries as the cosine does; equal for equal cosines as long as the dot product is below 2^26.
        return self.dots[entry] * self.dots[entry] / self.store.square_of[entry]

    cdef void count(self, int32_t layer, const int32_t *gids, const int32_t *weights, int n, bint decode) noexcept
    cdef int32_t find(self) noexcept nogil
    cdef float ratio(self, int32_t gid, int32_t layer) noexcept nogil
    cdef void refresh(self, int32_t entry) noexcept nogil
    cpdef int load(self, counts) except -1
    cdef void _add(self, const int32_t *gids, const int32_t *weights, int n, bint decode) noexcept nogil
    cdef bint _before(self, double key, int32_t entry, int i, bint oldest) noexcept nogil
    cdef int _find_best(self, int p, bint oldest) noexcept nogil
    cdef int _offer(self, int32_t entry, int size, int p, bint oldest) noexcept nogil
