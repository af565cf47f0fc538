"""What finished requests did (the store), and a running request held against them (the running match)."""

import cython
import numpy as np

from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc

from moecache.errors import RoutingError, refuse_copy

from moecache._decide.arrays cimport address_of, keep, nearly
from moecache._decide.gil cimport GilPolicy
from moecache._decide.layout cimport Layout
from moecache._decide.pairs cimport PairTable
from moecache._decide.reuse cimport OnlineWeights
from moecache._decide.sync cimport moe_now_ns

cdef extern from "_match.h" nogil:
    ptrdiff_t moe_place(ptrdiff_t entry)
    void moe_add_columns(double *dots, const uint8_t *columns, ptrdiff_t stride, const int32_t *gids,
                         const int32_t *weights, int k, int wide, double scale, ptrdiff_t n)
    ptrdiff_t moe_reaching(int32_t *entries, const double *dots, const float *inverse_norm, ptrdiff_t n, float least)

cdef extern from "<pthread.h>" nogil:
    int pthread_rwlock_init(pthread_rwlock_t *, void *)
    int pthread_rwlock_rdlock(pthread_rwlock_t *)
    int pthread_rwlock_wrlock(pthread_rwlock_t *)
    int pthread_rwlock_unlock(pthread_rwlock_t *)
    int pthread_rwlock_destroy(pthread_rwlock_t *)

# A list of overflow counts is walked while it is this many times shorter than the store; a walk costs about a nanosecond an
# entry, adding the column of all high bytes a thirtieth of that.
cdef enum:
    FEW = 32
# Tokens of all requests together, and of one expert: what a file may say (tensorfile.MOST_TOKENS), far from wrapping.
cdef int64_t MOST_TOKENS = 1LL << 53


@cython.final
cdef class HistoryStore:
    """Activation matrices of finished requests, transposed, with what they say about the next step.

    ``columns[gid][i]`` is a byte, so that routing k experts adds k contiguous columns to a running dot product. The high
    bytes of counts above 255 lie in columns of their own, made when the first such count comes: the sums are exact whole
    numbers. Memory is 5 bytes per request and expert, 6 with high bytes, and a running request's dot products take 8
    bytes per stored request.

    Parameters
    ----------
    num_experts : int32 array [L]
        Experts of each MoE layer.
    capacity : int
        Requests kept.
    """

    def __cinit__(self, num_experts, int32_t capacity):
        pthread_rwlock_init(&self.guard, NULL)
        self._memory, self.matches = [], []
        self.layout, self.gil = Layout(num_experts), GilPolicy()
        gids = self.layout.num_gids
        self.capacity = capacity
        self.stride = (capacity + 63) // 64 * 64
        self.columns = <uint8_t *> keep(self._memory, np.zeros(gids * self.stride, np.uint8))
        self._high = np.zeros(0, np.uint8)
        self.inverse_norm = <float *> keep(self._memory, np.zeros(self.stride, np.float32))
        self.row_inverse = <float *> keep(self._memory, np.zeros((capacity, self.layout.num_layers), np.float32))
        self.square, self.written = np.zeros(self.stride, np.float64), np.zeros(capacity, np.int64)
        self.square_of, self.written_at = <double *> keep(self._memory, self.square), <int64_t *> keep(self._memory, self.written)
        self.prompt_counts, self.decode_counts = (np.zeros((capacity, gids), np.uint16) for _ in range(2))
        self.prompt, self.decode = <uint16_t *> keep(self._memory, self.prompt_counts), <uint16_t *> keep(self._memory, self.decode_counts)
        self.total = np.zeros(gids, np.int64)
        self.total_of = <int64_t *> keep(self._memory, self.total)
        self.transitions, self.successions = PairTable(self.layout, True), PairTable(self.layout, False, forgets=True)
        self.weights = OnlineWeights()
        self.overflow = <OverflowCounts *> calloc(gids, sizeof(OverflowCounts))
        if self.overflow == NULL:
            raise MemoryError(f"no memory for the counts of {gids} experts")

    def __reduce__(self):
        refuse_copy(self)

    def __dealloc__(self):
        cdef int32_t gid
        if self.overflow != NULL:
            for gid in range(self.layout.num_gids):
                free(self.overflow[gid].pair)
            free(self.overflow)
        pthread_rwlock_destroy(&self.guard)

    cdef void begin_scan(self) noexcept nogil:
        # Until `end_scan` nobody replaces an entry, be the GIL held or not.
        pthread_rwlock_rdlock(&self.guard)

    cdef void end_scan(self) noexcept nogil:
        pthread_rwlock_unlock(&self.guard)

    cdef void add_columns(self, double *dots, const int32_t *gids, const int32_t *weights, int k, bint wide) noexcept nogil:
        """Add the columns of `k` experts times their weights to the dot product with each entry; not `wide`: all are 1."""
        cdef int32_t[64] many
        cdef int32_t[64] heavy
        cdef int j, n = 0
        moe_add_columns(dots, self.columns, self.stride, gids, weights, k, wide, 1, self.size)
        for j in range(k):
            if self.overflow[gids[j]].size * FEW < self.size:
                self._add_overflow(dots, &self.overflow[gids[j]], 256.0 * weights[j])
                continue
            many[n], heavy[n] = gids[j], weights[j]
            n += 1
            if n == 64:
                moe_add_columns(dots, self.high, self.stride, many, heavy, n, wide, 256, self.size)
                n = 0
        if n:
            moe_add_columns(dots, self.high, self.stride, many, heavy, n, wide, 256, self.size)

    cdef void _add_overflow(self, double *dots, const OverflowCounts *counts, double weight) noexcept nogil:
        cdef int32_t i
        for i in range(0, 2 * counts.size, 2):
            dots[counts.pair[i]] += weight * counts.pair[i + 1]

    cdef int _push_overflow(self, OverflowCounts *counts, int32_t entry, int32_t high) except -1:
        cdef int32_t capacity = 2 * counts.capacity + 4
        cdef int32_t *grown
        if counts.size == counts.capacity:
            grown = <int32_t *> realloc(counts.pair, 2 * capacity * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError(f"no memory for {capacity} counts above 255 of one expert")
            counts.pair, counts.capacity = grown, capacity
        counts.pair[2 * counts.size], counts.pair[2 * counts.size + 1] = entry, high
        counts.size += 1
        return 0

    cdef void _drop_overflow(self, OverflowCounts *counts, int32_t entry) noexcept nogil:
        cdef int32_t i
        for i in range(0, 2 * counts.size, 2):
            if counts.pair[i] == entry:
                counts.size -= 1
                counts.pair[i], counts.pair[i + 1] = counts.pair[2 * counts.size], counts.pair[2 * counts.size + 1]
                return

    cdef int _write(self, int32_t entry, const uint16_t *prompt, const uint16_t *decode) except -1:
        cdef int32_t gid, layer, count
        cdef Py_ssize_t place = moe_place(entry), at, row = <Py_ssize_t> entry * self.layout.num_gids
        cdef int64_t square = 0, total
        for layer in range(self.layout.num_layers):
            total = 0
            for gid in range(self.layout.offset[layer], self.layout.offset[layer + 1]):
                at = gid * self.stride + place
                if self.joined(entry, gid) > 255:
                    self._drop_overflow(&self.overflow[gid], entry)
                self.prompt[row + gid], self.decode[row + gid] = prompt[gid], decode[gid]
                count = self.joined(entry, gid)
                if count > 255:
                    self._push_overflow(&self.overflow[gid], entry, count >> 8)
                self.columns[at] = count & 255
                if self.high != NULL:
                    self.high[at] = count >> 8
                square += <int64_t> count * count
                total += count
            self.row_inverse[<Py_ssize_t> entry * self.layout.num_layers + layer] = 1.0 / total if total else 0.0
        self.square_of[entry] = square
        self.inverse_norm[entry] = 1.0 / sqrt(<double> square) if square else 0.0
        self.written_at[entry] = self.finished
        return 0

    @property
    def nbytes(self):
        """Bytes of memory, for all of `capacity` whether filled or not."""
        pairs = (self.transitions.counts, self.transitions.origins, self.successions.counts, self.successions.origins)
        return sum(array.nbytes for array in (*self._memory, self._high, *pairs))

    def order(self):
        """int64 array [size]: the entries, oldest first. An entry is as old as the request that it holds now."""
        return np.argsort(self.written[:self.size])

    def add(self, prompt, decode, int64_t tokens, RunningMatch match=None, int32_t entry=-1):
        """Keep one finished request; a full store evicts the entry that resembles it most, the oldest of several.

        Parameters
        ----------
        prompt, decode : integer array [M]
            Activation counts by gid. Counts above 65535 are kept as 65535, and their sum is matched as at most that.
        tokens : int
            Tokens the counts stand for.
        match : RunningMatch, optional
            The request's own, whose dot products save a scan of the store.
        entry : int, optional
            Where to keep it; entries are filled in ascending order before any is replaced.

        Returns
        -------
        int
            The entry written, or -1 for a request that routed nothing.

        Raises
        ------
        ValueError
            Not M counts, or an entry beyond the next free one. Nothing has changed.
        """
        cdef RunningMatch other
        p, d = (np.minimum(counts, 65535).astype(np.uint16) for counts in (prompt, decode))
        if len(p) != self.layout.num_gids or len(d) != self.layout.num_gids:
            raise ValueError(f"expected {self.layout.num_gids} counts, got {len(p)} and {len(d)}")
        if not -1 <= entry <= min(self.size, self.capacity - 1):
            raise ValueError(f"entry {entry}: expected at most {min(self.size, self.capacity - 1)}")
        joined = np.asarray(prompt, np.int64) + np.asarray(decode, np.int64)
        if not joined.any():
            return -1
        if entry < 0:
            entry = self.size if self.size < self.capacity else self._entry_to_replace(match, joined)
        high = self._high
        if joined.max() > 255 and not len(high):
            high = np.zeros(self.layout.num_gids * self.stride, np.uint8)
        cdef const uint16_t *prompt_at = <const uint16_t *> address_of(p)
        cdef const uint16_t *decode_at = <const uint16_t *> address_of(d)
        cdef uint8_t *high_at = <uint8_t *> address_of(high) if len(high) else NULL
        # No Python object is made while the lock is held: a finaliser could come back here.
        pthread_rwlock_wrlock(&self.guard)
        try:
            self._high, self.high = high, high_at
            self._write(entry, prompt_at, decode_at)
            if entry == self.size:
                self.size += 1
            else:
                self.replaced += 1
            self.finished += 1
            for other in self.matches:
                other.refresh(entry)
        finally:
            pthread_rwlock_unlock(&self.guard)
        np.minimum(self.total + joined, MOST_TOKENS, out=self.total)
        self.tokens = min(self.tokens + tokens, MOST_TOKENS)
        return entry

    cdef int32_t _entry_to_replace(self, RunningMatch match, joined) except -1:
        if match is None:
            match = RunningMatch(self)
            match.load(joined)
        # Nothing in common with any: the oldest.
        return match.best[0] if match._find_best(1, True) else <int32_t> self.written.argmin()

    def learned(self):
        """dict of uint32 arrays: the counts of who followed whom, by the names and in the order of `restore`."""
        return {"transitions": self.transitions.counts, "origins": self.transitions.origins,
                "successions": self.successions.counts, "followed": self.successions.origins}

    def restore(self, total, tokens, transitions, origins, successions, followed):
        """Put back what `add` and the requests had accumulated, after the entries were added again.

        Counts of pairs may be larger than the store's own: those of a layer are halved together until they fit.
        """
        self.total[:] = np.minimum(total, MOST_TOKENS)
        self.tokens = min(tokens, MOST_TOKENS)
        self.transitions.restore(transitions, origins)
        self.successions.restore(successions, followed)


@cython.final
cdef class RunningMatch:
    """The activation matrix of one request as it grows, and its similarity to every stored one.

    Parameters
    ----------
    store : HistoryStore
    """

    def __cinit__(self, HistoryStore store):
        self.store = store
        self.prompt_counts, self.decode_counts = (np.zeros(store.layout.num_gids, np.int64) for _ in range(2))
        row_sum, dots = np.zeros(store.layout.num_layers, np.int64), np.zeros(store.stride, np.float64)
        near = np.zeros(store.stride, np.int32)
        self._memory = [row_sum, dots, near]
        self.prompt, self.decode = (
            <int64_t *> address_of(self.prompt_counts), <int64_t *> address_of(self.decode_counts))
        self.row_sum, self.dots = <int64_t *> address_of(row_sum), <double *> address_of(dots)
        self.near = <int32_t *> address_of(near)

    def __reduce__(self):
        refuse_copy(self)

    @property
    def counts(self):
        """int64 array [M]: the activation matrix so far, prompt and decode together."""
        return self.prompt_counts + self.decode_counts

    cpdef int load(self, counts) except -1:
        """Count a whole activation matrix at once (int64 array [M])."""
        gids = np.flatnonzero(counts).astype(np.int32)
        weights = np.asarray(counts)[gids].astype(np.int32)
        if len(gids):
            self._add(<const int32_t *> address_of(gids), <const int32_t *> address_of(weights), <int> len(gids), False)
        return 0

    cdef void refresh(self, int32_t entry) noexcept nogil:
        # An entry was written under a running request: its dot product starts over.
        cdef int32_t gid
        cdef int64_t total = 0
        for gid in range(self.store.layout.num_gids):
            total += self.count_of(gid) * self.store.joined(entry, gid)
        self.dots[entry] = total
        self.num_best = 0

    cdef void count(self, int32_t layer, const int32_t *gids, const int32_t *weights, int n, bint decode) noexcept:
        """Count `n` experts of a layer, each used by so many tokens. May release the GIL."""
        cdef int j
        cdef int64_t begun, ended
        for j in range(n):
            self.row_sum[layer] += weights[j]
        if not self.store.gil.releases(<int64_t> n * self.store.size):
            self._add(gids, weights, n, decode)
            return
        # Nobody else counts into this request, and whoever replaces an entry waits for the scan, so that the counts and
        # the dot products are one to him.
        self.store.begin_scan()
        begun = moe_now_ns()
        self.scanning = True
        with nogil:
            self._add(gids, weights, n, decode)
            self.find()
            self.store.end_scan()
            ended = moe_now_ns()
        self.scanning = False
        self.store.gil.took_back(begun, ended)

    cdef void _add(self, const int32_t *gids, const int32_t *weights, int n, bint decode) noexcept nogil:
        cdef int j
        cdef int64_t before
        cdef bint wide = False
        cdef int64_t *into = self.decode if decode else self.prompt
        for j in range(n):
            before = self.count_of(gids[j])
            self.square += weights[j] * (2 * before + weights[j])
            into[gids[j]] += weights[j]
            wide |= weights[j] != 1
        if self.store.size:
            self.store.add_columns(self.dots, gids, weights, n, wide)
        self.num_best = 0

    cdef bint _before(self, double key, int32_t entry, int i, bint oldest) noexcept nogil:
        # Whether an entry goes before the i-th best. Of equally similar ones the newest comes first, or the oldest.
        if key != self.best_key[i]:
            return key > self.best_key[i]
        return (self.store.written_at[entry] > self.store.written_at[self.best[i]]) != oldest

    cdef int _find_best(self, int p, bint oldest) noexcept nogil:
        # The p entries of largest cosine similarity into `best`, best first; returns how many have any. One scan lists the
        # entries that reach what the best ones of the last time are worth now, seldom many more than they; those are
        # looked at in full precision.
        cdef double least = 0
        cdef float least_score
        cdef int i, size = 0
        cdef int32_t entry
        cdef Py_ssize_t n, near
        if self.num_found >= p:
            least = self._key(self.best[0])
            for i in range(1, p):
                least = min(least, self._key(self.best[i]))
        least_score = max(<float> nearly(sqrt(least)), <float> 1e-30)
        near = moe_reaching(self.near, self.dots, self.store.inverse_norm, self.store.size, least_score)
        for n in range(near):
            entry = self.near[n]
            if <float> self.dots[entry] * self.store.inverse_norm[entry] >= least_score:
                size = self._offer(entry, size, p, oldest)
                if size == p:
                    least_score = max(least_score, <float> nearly(sqrt(self.best_key[p - 1])))
        self.num_found = size
        self.num_best = 0 if oldest else size
        return size

    cdef int _offer(self, int32_t entry, int size, int p, bint oldest) noexcept nogil:
        cdef double key = self._key(entry)
        cdef int i
        if size == p:
            if not self._before(key, entry, p - 1, oldest):
                return size
            i = p - 1
        else:
            i = size
            size += 1
        while i > 0 and self._before(key, entry, i - 1, oldest):
            self.best[i], self.best_key[i] = self.best[i - 1], self.best_key[i - 1]
            i -= 1
        self.best[i], self.best_key[i] = entry, key
        return size

    cdef int32_t find(self) noexcept nogil:
        """The entry of largest cosine similarity; -1 when nothing is stored or nothing in common."""
        if self.num_best == 0 and self._find_best(1, False) == 0:
            return -1
        return self.best[0]

    cdef float ratio(self, int32_t gid, int32_t layer) noexcept nogil:
        """Share of the layer's activations that went to the expert in the best matching request, or in this one before there
        is any."""
        cdef int32_t entry = self.find()
        if entry >= 0:
            return self.store.share(entry, gid, layer)
        if self.row_sum[layer]:
            return <float> self.count_of(gid) / self.row_sum[layer]
        return 0.0

    def matches(self, int p):
        """The best matches among the stored requests.

        Parameters
        ----------
        p : int
            How many, at most 16.

        Returns
        -------
        (int32 array, float64 array)
            Entries and cosine similarities, the largest first and of equal ones the newest. Fewer than `p` where fewer
            have anything in common with the request.

        Raises
        ------
        ValueError
            `p` is out of range.
        """
        if not 1 <= p <= MAX_BEST:
            raise ValueError(f"{p} matches: expected 1..{MAX_BEST}")
        cdef int n = self._find_best(p, False), i
        entries = np.array([self.best[i] for i in range(n)], np.int32)
        return entries, np.sqrt(np.array([self.best_key[i] for i in range(n)], np.float64) / max(self.square, 1))

    def match_step(self, int32_t layer, uintptr_t ids, int k):
        """Count one token's experts at one layer and return the best match.

        Parameters
        ----------
        layer : int
        ids : int
            Address of `k` distinct experts of the layer, int32.
        k : int
            At most 64.

        Returns
        -------
        (int, float)
            Entry and cosine similarity; (-1, 0.0) when nothing stored has anything in common.

        Raises
        ------
        RoutingError
            A number is out of range. Nothing has changed.
        """
        cdef Layout layout = self.store.layout
        cdef const int32_t *experts = <const int32_t *> ids
        cdef int32_t[64] gids
        cdef int32_t[64] weights
        cdef int j
        cdef int32_t entry
        if not 0 <= layer < layout.num_layers or not 0 <= k <= 64:
            raise RoutingError(
                f"layer {layer} with {k} ids: expected a layer below {layout.num_layers} and at most 64 ids")
        for j in range(k):
            if not 0 <= experts[j] < layout.experts[layer]:
                raise RoutingError(f"layer {layer}: expert {experts[j]} is outside 0..{layout.experts[layer] - 1}")
            gids[j] = layout.offset[layer] + experts[j]
            weights[j] = 1
        self.row_sum[layer] += k
        self._add(gids, weights, k, True)
        entry = self.find()
        if entry < 0:
            return -1, 0.0
        return entry, sqrt(self.best_key[0] / self.square)

    def similarities(self):
        """float64 array [size]: cosine similarity to every stored request; zero where either side is empty."""
        size = self.store.size
        square = self.store.square[:size] * max(self.square, 1)
        return np.asarray(self._memory[1])[:size] / np.sqrt(np.where(square, square, 1))
