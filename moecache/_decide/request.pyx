"""A running request: what it has done so far, and what that says of its coming layers."""

import cython
import numpy as np

from libc.math cimport pow
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from moecache.errors import RoutingError, refuse_copy

from moecache._decide.arrays cimport address_of, keep
from moecache._decide.forecast cimport ForecastState, ForecastWeights
from moecache._decide.history cimport HistoryStore, RunningMatch
from moecache._decide.layout cimport Layout, routed
from moecache._decide.reuse cimport INTERVALS, ReusePredictor
from moecache._decide.step cimport Account, Step

# Decay per token of the two frequencies (docs/policies.md has the replay behind them).
cdef double FAST = 0.3, SLOW = 0.02


@cython.final
cdef class Hints:
    """What somebody who knows more says of a request's coming layers: chances by gid, and of which layers they are."""

    def __cinit__(self, HistoryStore store):
        chance, given = np.zeros(store.layout.num_gids, np.float32), np.zeros(store.layout.num_layers, np.uint8)
        self._memory = [chance, given]
        self.chance, self.given = <float *> address_of(chance), <uint8_t *> address_of(given)

    def __reduce__(self):
        refuse_copy(self)

    cdef int give(self, int32_t layer, int32_t begin, object chances) except -1:
        self._memory[0][begin:begin + len(chances)] = chances
        self.given[layer] = 1
        return 0


@cython.final
cdef class RequestState:
    """Counts and estimates of one running request.

    Parameters
    ----------
    store : HistoryStore
    number : int
        Tells it from other requests of its core.
    """

    def __cinit__(self, HistoryStore store, int64_t number):
        gids, layers, widest = store.layout.num_gids, store.layout.num_layers, store.layout.widest
        self.store, self.match, self.account = store, RunningMatch(store), Account(number)
        self.predictor = ReusePredictor(store.layout, store.weights)
        self._memory = []
        self.fast = <float *> keep(self._memory, np.zeros(gids, np.float32))
        self.slow = <float *> keep(self._memory, np.zeros(gids, np.float32))
        self.lift = <double *> keep(self._memory, np.ones(gids, np.float64))
        self.work = <double *> keep(self._memory, np.zeros(widest, np.float64))
        self.matched = <float *> keep(self._memory, np.zeros(widest, np.float32))
        self.last_ids = <int32_t *> keep(self._memory, np.full((layers, MAX_SUCCESSION), -1, np.int32))
        self.last_tokens = <int32_t *> keep(self._memory, np.zeros(layers, np.int32))
        self.last_k = <int32_t *> keep(self._memory, np.zeros(layers, np.int32))
        self.rows, self.previous_layer = 1, -1

    def __dealloc__(self):
        free(self.previous_ids)

    def __reduce__(self):
        refuse_copy(self)

    def hint(self, int32_t layer, chances):
        """Take these chances (in 0..1) of its next visit to a layer for granted, until it comes.

        Raises
        ------
        RoutingError
            The layer is out of range, the length is not its number of experts, or a number is no chance. Nothing has
            changed.
        """
        cdef Layout layout = self.store.layout
        layout.check_layer(layer)
        given = np.asarray(chances, np.float32)
        if given.shape != (layout.experts[layer],):
            raise RoutingError(f"layer {layer}: {given.shape[0] if given.ndim == 1 else given.shape} chances; expected one for "
                               f"each of its {layout.experts[layer]} experts")
        outside = np.flatnonzero(~((given >= 0) & (given <= 1)))   # NaN compares false
        if len(outside):
            raise RoutingError(f"layer {layer}: the chance of expert {outside[0]} is {given[outside[0]]}; expected 0 to 1")
        if self.hints is None:
            self.hints = Hints(self.store)
        self.hints.give(layer, layout.offset[layer], given)

    cdef void start(self, const float *prior) noexcept nogil:
        cdef int32_t gid
        for gid in range(self.store.layout.num_gids):
            self.fast[gid] = prior[gid]
            self.slow[gid] = prior[gid]

    cdef int attach_forecaster(self, ForecastWeights weights) except -1:
        self.outside = <float *> keep(self._memory, np.zeros(INTERVALS * self.store.layout.widest, np.float32))
        self.predictor.attach_forecaster()
        self.forecast = ForecastState(weights, self.store.layout)
        return 0

    cdef int count(self, Step step) except -1:
        """The step into the activation matrix and the running match. May release the GIL."""
        cdef int32_t offset = self.store.layout.offset[step.layer]
        cdef int i, n = 0
        for i in range(step.unique):
            if step.counted[i]:
                step.work[n] = offset + step.experts[i]
                step.work[step.unique + n] = step.counted[i]
                n += 1
        self.match.count(step.layer, step.work, step.work + step.unique, n, step.decode)
        return 0

    cdef int observe(self, Step step) except -1:
        """What a step that `count` has counted shows: decayed frequencies, first uses, what follows it."""
        self._decay(step)
        if step.decode and step.tokens == 1 and step.counted_tokens == 1:
            self.predictor.count(step.layer, step.ids, step.k)
        else:
            self.predictor.skip(step.layer)
        if self.forecast is not None:
            self.forecast.visit(step.layer, step.ids, step.tokens, step.k)
        if step.tokens:
            self._lift_successors(step)
        if self.hints is not None:
            self.hints.given[step.layer] = 0
        if step.layer == 0:
            if step.decode:
                self.decode_tokens += step.counted_tokens
                self.rows = <int32_t> max(step.counted_tokens, 1)
            else:
                self.prompt_tokens += step.counted_tokens
        return 0

    cdef void _decay(self, Step step) noexcept nogil:
        # Later tokens weigh more, so rows are taken from the last to the first.
        cdef int32_t offset = self.store.layout.offset[step.layer], experts = self.store.layout.experts[step.layer], e
        cdef int j
        cdef Py_ssize_t t
        cdef double fast = FAST, slow = SLOW, keep_fast, keep_slow
        keep_fast = pow(1 - FAST, <double> step.counted_tokens)
        keep_slow = pow(1 - SLOW, <double> step.counted_tokens)
        for e in range(experts):
            self.fast[offset + e] *= keep_fast
            self.slow[offset + e] *= keep_slow
        for t in range(step.tokens - 1, -1, -1):
            if not routed(&step.ids[t * step.k], step.k):
                continue
            for j in range(step.k):
                e = step.ids[t * step.k + j]
                if e >= 0:
                    self.fast[offset + e] += fast
                    self.slow[offset + e] += slow
            fast *= 1 - FAST
            slow *= 1 - SLOW

    cdef void _lift_successors(self, Step step) noexcept nogil:
        # What one token's experts say of the layer's next visit. A batch's rows have no common next token.
        cdef int32_t offset = self.store.layout.offset[step.layer], e
        if step.decode and step.tokens > 1:
            for e in range(self.store.layout.experts[step.layer]):
                self.lift[offset + e] = 1
            return
        self.store.successions.lift(step.layer, &self.lift[offset], self.work, step.ids + (step.tokens - 1) * step.k, step.k,
                                    step.k)

    cdef void predict(self, int32_t layer, const float *prior, int k) noexcept:
        """Hazards of one layer's experts from what the request has done by now; `prior` [M] is the usual share of each, and a
        token has `k`."""
        cdef HistoryStore store = self.store
        cdef int32_t begin = store.layout.offset[layer], n = store.layout.experts[layer], e, entry = self.match.find()
        if entry >= 0:
            for e in range(n):
                self.matched[e] = k * store.row_inverse[<Py_ssize_t> entry * store.layout.num_layers + layer] * store.joined(
                    entry, begin + e)
        else:
            memcpy(self.matched, &prior[begin], n * sizeof(float))
        if self.outside != NULL:
            self.forecast.hazards(layer, self.outside)
        self.predictor.predict(layer, &self.slow[begin], &self.fast[begin], &prior[begin], &self.lift[begin], self.matched,
                               self.outside, self.rows)

    cdef int record(self, Step step) except -1:
        """Into the tables of pairs, and keep the ids for the next step."""
        # Layer transitions need the ids of the layer before; the rows are the same tokens when their number is the
        # same.
        cdef HistoryStore store = self.store
        cdef Py_ssize_t used = min(step.tokens, <Py_ssize_t> LEARNED_ROWS)
        cdef bint follows = self.previous_layer >= 0 and self.previous_tokens == step.tokens
        if follows and step.layer == self.previous_layer + 1 or (
                follows and step.decode and step.layer == 0 and self.previous_layer == store.layout.num_layers - 1):
            store.transitions.learn(self.previous_layer, self.previous_ids, step.ids, used, self.previous_k, step.k)
        self._record_successions(step)
        return self._keep_ids(step)

    cdef void _record_successions(self, Step step) noexcept:
        # The rows of a decode step follow the same rows of the one before it; the first token of a completion follows the
        # last of the prompt, and within a prompt each row follows the one above it.
        cdef HistoryStore store = self.store
        cdef int32_t layer = step.layer
        cdef int32_t *last = &self.last_ids[<Py_ssize_t> layer * MAX_SUCCESSION]
        cdef Py_ssize_t kept = step.tokens if step.decode else 1
        if self.last_tokens[layer] and self.last_tokens[layer] == step.tokens:
            store.successions.learn(layer, last, step.ids, step.tokens, self.last_k[layer], step.k)
        if not step.decode and step.tokens > 1:
            store.successions.learn(layer, step.ids, step.ids + step.k,
                                    min(step.tokens, <Py_ssize_t> LEARNED_ROWS) - 1, step.k, step.k)
        self.last_tokens[layer] = 0
        if step.tokens and kept * step.k <= MAX_SUCCESSION:
            self.last_tokens[layer], self.last_k[layer] = <int32_t> kept, step.k
            memcpy(last, step.ids + (step.tokens - kept) * step.k, kept * step.k * sizeof(int32_t))

    cdef int _keep_ids(self, Step step) except -1:
        # Only as many rows as are learned from.
        cdef Py_ssize_t wanted = min(step.tokens, <Py_ssize_t> LEARNED_ROWS) * step.k
        cdef int32_t *grown
        self.previous_layer = -1
        if wanted > self.previous_capacity:
            grown = <int32_t *> realloc(self.previous_ids, wanted * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError(f"no memory for the ids of {step.tokens} tokens")
            self.previous_ids, self.previous_capacity = grown, wanted
        if wanted:
            memcpy(self.previous_ids, step.ids, wanted * sizeof(int32_t))
        self.previous_layer, self.previous_tokens, self.previous_k = step.layer, step.tokens, step.k
        return 0
