"""Which experts of coming layers to fetch ahead: how likely each is, which are worth a transfer, and when one no longer is."""

import cython
import numpy as np

from libc.stdint cimport int32_t, int64_t, uint32_t

from moecache.errors import refuse_copy

from moecache._decide.arrays cimport address_of
from moecache._decide.batch cimport BatchState
from moecache._decide.evict cimport Evictor
from moecache._decide.layout cimport Layout
from moecache._decide.pairs cimport PairTable
from moecache._decide.plan cimport Plan
from moecache._decide.request cimport RequestState
from moecache._decide.slots cimport MAX_IN_FLIGHT, InFlight
from moecache._decide.step cimport Step
from moecache._decide.trust cimport Trust

# From which chance on an expert is worth moving ahead of its layer (docs/policies.md has the replays behind the
# numbers): while nobody has said how fast layers and link are, and then. The victim's next use must be expected this
# many tokens later. One under way is dropped when its chance falls to this share of what a new one needs. A resident
# expert as likely as this in a coming layer is no victim.
cdef float CHANCE_BLIND = 0.5, CHANCE_WANTED = 0.2
cdef float MARGIN_TOKENS = 1.0
cdef float DROPPED = 0.5
cdef float SHIELDED = 0.5
# Share of prefetches that must prove useful where not more is needed to break even; below it only one step in 64 still
# tries, picked by a hash (Knuth's multiplicative one) so that it is not always the same layer's.
cdef float USEFUL_FLOOR = 0.2
cdef uint32_t HASH = 2654435761
# By which factor one sample moves the running median of the layer time.
cdef double PACE_STEP = 1.05


@cython.final
cdef class Prefetcher:
    """Chooses what to fetch ahead.

    Parameters
    ----------
    evictor : Evictor
    transitions : PairTable
        Which experts of the next layer followed.
    enabled : bool
        Whether anything is fetched ahead.
    by_match : bool
        Take an expert's chance from the best matching request alone.
    """

    def __cinit__(self, Evictor evictor, PairTable transitions, bint enabled, bint by_match):
        self.evictor, self.slots, self.ledger, self.transitions = evictor, evictor.slots, evictor.slots.ledger, transitions
        self.enabled, self.by_match, self.floor = enabled, by_match, USEFUL_FLOOR
        widest = evictor.slots.layout.widest
        self.trust = Trust(widest)
        self._memory = [np.zeros(widest, np.float32), np.zeros(2 * widest, np.float64)]
        self.chance, self.work = <float *> address_of(self._memory[0]), <double *> address_of(self._memory[1])

    def __reduce__(self):
        refuse_copy(self)

    cpdef void set_pace(self, double layer_s, double expert_s, double chunk_s) noexcept nogil:
        """What a clock says. Without it prefetching looks one layer ahead only.

        Parameters
        ----------
        layer_s : float
            Seconds from one step of a request to its next, less what it waited for bytes; 0: not known. A running median is kept.
        expert_s : float
            Seconds that the link takes for one expert.
        chunk_s : float
            Seconds for which a copy under way can hold up one that is wanted more.
        """
        # A median is not moved by the pause between two requests, nor by the one slow layer of a pass.
        if expert_s > 0:
            self.expert_s, self.chunk_s = expert_s, chunk_s
            self.ledger.chunk_share = chunk_s / expert_s
        if layer_s > 0:
            if self.layer_s == 0:
                self.layer_s = layer_s
            else:
                self.layer_s *= PACE_STEP if layer_s > self.layer_s else 1 / PACE_STEP
        if self.expert_s > 0 and self.layer_s > 0:
            # A chunk that begins in the idle time of a step holds up a demand for what is then left of it: of what moves
            # ahead, at worst chunk / (layer + chunk) delays something else. Chances are asked for that much. What they
            # come to is held against what is lost on the mean, chunk / (2 layer + chunk), and something for the slots.
            self.idle = self.layer_s / self.expert_s
            self.break_even = self.chunk_s / (self.layer_s + self.chunk_s)
            self.floor = max(USEFUL_FLOOR, self.chunk_s / (1.5 * self.layer_s + self.chunk_s), 1 - self.layer_s / self.chunk_s)

    # How prefetches end

    cdef int _cancel(self, int i, Plan plan) except -1 nogil:
        cdef int32_t slot = self.ledger.entry[i].slot
        cdef bint landed = self.slots.is_complete(slot)
        if not landed:
            plan.drop(slot, self.slots.generation[slot])
        self.slots.speculative[slot] = 0
        self.ledger.waste(i, landed)
        if not landed:
            self.slots.discard(slot)
        return 0

    cdef int settle(self, int64_t owner, Step step) except -1:
        """The layer has come: what was fetched for it and not asked for was wrong. What is still on its way is dropped."""
        cdef int i
        self._advance()
        self.trust.judge(owner, step)
        for i in range(self.ledger.size - 1, -1, -1):
            if self.ledger.entry[i].owner == owner and self.slots.layout.layer_of[self.ledger.entry[i].gid] == step.layer:
                self._cancel(i, step.plan)
        return 0

    cdef void forget(self, int64_t owner) noexcept nogil:
        """The request ended: nobody waits for its prefetches any more. One still in flight lands and is an ordinary occupant
        then."""
        cdef int i
        for i in range(self.ledger.size - 1, -1, -1):
            if self.ledger.entry[i].owner == owner:
                self.slots.speculative[self.ledger.entry[i].slot] = 0
                self.ledger.waste(i, True)

    # What is known of coming layers

    cdef const float *forecast(self, RequestState request, Step step, int32_t target, int distance, const float *use) noexcept:
        """Chance that the request uses each expert of `target`, `distance` layer steps from now; `use` is that of its next
        visit, whatever this step shows."""
        if request.hints is not None and request.hints.given[target]:
            return &request.hints.chance[self.slots.layout.offset[target]]
        if request.forecast is not None and distance <= request.forecast.weights.distances and step.tokens == 1 and (
                self.trust.lead > 0):
            return request.forecast.ahead(step.layer, distance, step.ids, step.k)
        return self._by_counts(request, step, target, distance, use)

    cdef const float *_by_counts(self, RequestState request, Step step, int32_t target, int distance, const float *use) noexcept:
        cdef Layout layout = self.slots.layout
        cdef int32_t begin = layout.offset[target], e
        if self.by_match:
            for e in range(layout.experts[target]):
                self.chance[e] = min(request.match.ratio(begin + e, target) * step.k, <float> 1.0)
        elif distance == 1:
            self.transitions.chances_after(step.layer, self.chance, use, self.work, step.experts, step.unique, step.k)
        else:
            return use
        return self.chance

    cdef const float *forecast_all(self, BatchState batch, int32_t target, int distance) noexcept:
        """Chance that one of a batch's requests uses each expert of `target`, `distance` layer steps from now."""
        cdef int32_t begin = self.slots.layout.offset[target], count = self.slots.layout.experts[target], e
        cdef RequestState request
        cdef const float *chance
        cdef int i
        for e in range(count):
            batch.chance[e] = 0
        for i in range(len(batch.requests)):
            request = batch.requests[i]
            chance = self.forecast(request, <Step> batch.parts[i], target, distance, &request.predictor.hazard[begin])
            for e in range(count):
                batch.chance[e] += (1 - batch.chance[e]) * chance[e]
        return batch.chance

    # Which to move

    cdef bint _may(self, Step step) noexcept:
        # A pool smaller than one token's experts has no slots for guesses; neither has a step that touches many tokens'
        # worth.
        cdef Layout layout = self.slots.layout
        if not self.enabled or step.unique > 2 * step.k or layout.num_layers < 2:
            return False
        if not layout.num_layers * step.k <= self.slots.num_slots < layout.num_gids:
            return False
        return self.ledger.useful_share >= self.floor or (<uint32_t> self.slots.steps * HASH) >> 26 == 0

    cdef int plan(self, RequestState request, BatchState batch, Step step) except -1:
        """Queue prefetches for coming layers, where that is worth a transfer, and drop those that no longer are. The step is a
        request's, or, where there is one, a batch's."""
        cdef int64_t owner = request.account.number if batch is None else batch.account.number
        cdef double idle = step.k
        cdef float least = CHANCE_BLIND
        cdef int depth = 1, n
        if batch is None:
            self._try_forecaster(request, step, owner)
        else:
            self._try_forecaster(batch.first(), <Step> batch.parts[0], owner)
        if not self._may(step):
            return 0
        if self.idle > 0:
            idle = self.idle
            least = max(CHANCE_WANTED, self.break_even)
            depth = min(MAX_DEPTH, self.slots.layout.num_layers - 1)
        self.num_candidates, self.most_candidates = 0, min(MAX_CANDIDATES, MAX_IN_FLIGHT - self.ledger.size)
        self._rank(request, batch, step, depth, least)
        n = self._select(MAX_IN_FLIGHT - self.ledger.size, idle)
        if n:
            self._queue(owner, step, n)
        return 0

    cdef void _try_forecaster(self, RequestState request, Step step, int64_t owner) noexcept:
        # Whether anything is fetched or not, lest a forecaster that was not listened to is never heard again.
        cdef int32_t target = self.slots.layout.following(step.layer), begin
        if request.forecast is None or step.tokens != 1 or not self.enabled or not self.trust.due(self.slots.steps):
            return
        begin = self.slots.layout.offset[target]
        self.trust.begin(owner, self.slots.steps, target, request.forecast.ahead(step.layer, 1, step.ids, step.k),
                         self._by_counts(request, step, target, 1, &request.predictor.hazard[begin]),
                         self.slots.layout.experts[target])

    cdef void _advance(self) noexcept nogil:
        # What the link will have moved since the last step, one after another.
        cdef int i
        cdef double idle = self.idle
        cdef float moved
        cdef InFlight *entry
        for i in range(self.ledger.size):
            entry = &self.ledger.entry[i]
            if self.slots.is_complete(entry.slot):
                entry.left = 0
            moved = min(entry.left, <float> idle)
            entry.left -= moved
            idle -= moved

    cdef int _rank(self, RequestState request, BatchState batch, Step step, int depth, float least) except -1:
        # The likeliest experts of the coming layers that have no slot.
        cdef int d
        cdef int32_t target = step.layer
        cdef const float *use
        for d in range(1, depth + 1):
            target = self.slots.layout.following(target)
            if batch is None:
                use = &self.evictor.estimates.use[self.slots.layout.offset[target]]
                self._rank_layer(request.account.number, step.plan, target, d, least,
                                 self.forecast(request, step, target, d, use))
            else:
                self._rank_layer(batch.account.number, step.plan, target, d, least, self.forecast_all(batch, target, d))
        return 0

    cdef int _rank_layer(self, int64_t owner, Plan plan, int32_t target, int distance, float least,
                         const float *chance) except -1 nogil:
        # What is under way for the layer is known better now: one that has become unlikely is dropped.
        cdef int32_t begin = self.slots.layout.offset[target], count = self.slots.layout.experts[target], e
        cdef int i
        for i in range(self.ledger.size - 1, -1, -1):
            e = self.ledger.entry[i].gid - begin
            if self.ledger.entry[i].owner == owner and 0 <= e < count and chance[e] < DROPPED * least and not (
                    self.slots.is_complete(self.ledger.entry[i].slot)):
                self._cancel(i, plan)
        for e in range(count):
            if chance[e] < least:
                continue
            if self.slots.slot_of[begin + e] < 0:
                self._offer(Candidate(begin + e, distance, chance[e]))
            elif chance[e] >= SHIELDED:
                self.slots.shielded_until[begin + e] = self.slots.steps + distance
        return 0

    cdef void _offer(self, Candidate candidate) noexcept nogil:
        cdef int i
        if self.num_candidates == self.most_candidates:
            if self.num_candidates == 0 or candidate.chance <= self.candidate[self.num_candidates - 1].chance:
                return
            self.num_candidates -= 1
        i = self.num_candidates
        while i > 0 and self.candidate[i - 1].chance < candidate.chance:
            self.candidate[i] = self.candidate[i - 1]
            i -= 1
        self.candidate[i] = candidate
        self.num_candidates += 1

    cdef int _select(self, int wanted, double idle) noexcept nogil:
        # Of the candidates those that the link can begin before the next step, the likeliest first; returns how many. The link
        # must have idle time for a part of one before its layer comes, after all that is under way: a demand joins what has
        # begun. Later ones are left to the next step: it knows more, and a slot is not taken meanwhile.
        cdef double queued = 0, risk = 0
        cdef int i, n = 0
        for i in range(self.ledger.size):
            queued += self.ledger.entry[i].left
            if self.ledger.entry[i].left > 0:
                risk += 1 - self.ledger.entry[i].chance
        for i in range(self.num_candidates):
            if queued >= idle or n == wanted:
                break
            if self.candidate[i].distance * idle <= queued or risk + 1 - self.candidate[i].chance > self.ledger.credit:
                continue
            risk += 1 - self.candidate[i].chance
            queued += min(1, self.candidate[i].distance * idle - queued)
            self.candidate[n] = self.candidate[i]
            n += 1
        return n

    cdef int _queue(self, int64_t owner, Step step, int n) except -1:
        cdef int32_t group
        for group in range(self.slots.num_groups):
            self._queue_group(owner, step, n, group)
        return 0

    cdef int _queue_group(self, int64_t owner, Step step, int n, int32_t group) except -1:
        cdef Layout layout = self.slots.layout
        cdef Evictor evictor = self.evictor
        cdef int32_t slot, victim = 0, vacant = self.slots.vacant_count[group]
        cdef int i, wanted = 0
        cdef Candidate *candidate
        for i in range(n):
            wanted += self.slots.group_of[layout.layer_of[self.candidate[i].gid]] == group
        evictor.found.clear(0)
        if wanted > vacant:
            evictor.find_victims(group, wanted - vacant, step.layer, False)
        for i in range(n):
            candidate = &self.candidate[i]
            if self.slots.group_of[layout.layer_of[candidate.gid]] != group:
                continue
            if self.slots.vacant_count[group]:
                slot = self.slots.pop_vacant(group)
            elif victim < evictor.found.size and evictor.lateness(
                    self.slots.occupant[evictor.found.slots[victim]], step.layer) > (
                    candidate.distance + layout.num_layers * (1 / candidate.chance - 1 + MARGIN_TOKENS)):
                slot = evictor.found.slots[victim]
                victim += 1
            else:
                break
            self._start(owner, candidate, slot, step.plan)
        return 0

    cdef int _start(self, int64_t owner, const Candidate *candidate, int32_t slot, Plan plan) except -1:
        self.evictor.assign(slot, candidate.gid, plan)
        self.slots.speculative[slot] = 1
        self.ledger.begin(slot, candidate.gid, owner, candidate.chance)
        return plan.prefetch(candidate.gid, slot, self.slots.generation[slot])

    cdef void inherit(self, Prefetcher old) noexcept:
        """Prefetches that no step has asked for yet go on, but for those that got no slot any more."""
        cdef int i
        cdef int32_t slot
        self.ledger.inherit(old.ledger)
        for i in range(old.ledger.size):
            slot = self.slots.slot_of[old.ledger.entry[i].gid]
            if slot < 0:
                self.ledger.wasted += 1
                continue
            self.slots.speculative[slot] = 1
            self.ledger.resume(&old.ledger.entry[i], slot)
        self.trust.lead = old.trust.lead
        self.layer_s, self.expert_s, self.chunk_s = old.layer_s, old.expert_s, old.chunk_s
        self.idle, self.break_even, self.floor = old.idle, old.break_even, old.floor
