# Included by _core.pyx: which experts of a coming layer to fetch ahead, and how that turned out.

cdef enum:
    MAX_AHEAD = 64

# An expert is worth a transfer ahead of time from this chance on, and only over a victim whose next use is this many
# tokens later.
cdef float CHANCE_WANTED = 0.5
cdef float MARGIN_TOKENS = 1.0
# Exponent of the joint evidence of k experts, times sqrt(k): between counting it once (1 / k) and k times (1). Chosen by
# calibration.
cdef double TEMPER = 1.0
# Share of prefetches that must prove useful, measured over about the last 64; below it only one step in 16 still tries,
# picked by a hash (Knuth's multiplicative one) so that it is not always the same layer's.
cdef float USEFUL_FLOOR = 0.3
cdef double USEFUL_DECAY = 1.0 / 64


cdef class Prefetcher:
    """Prefetches on their way or not used yet, and the measured share of useful ones."""

    cdef bint enabled
    cdef int32_t top_k, num_ahead
    cdef int32_t[MAX_AHEAD] slot   # exactly those marked speculative
    cdef int64_t[MAX_AHEAD] owner
    cdef int64_t issued, useful, late, wasted, dropped
    cdef double useful_share
    cdef float[::1] chance
    cdef double[::1] lift

    def __cinit__(self, int32_t top_k, bint enabled):
        self.enabled, self.top_k = enabled, top_k
        self.useful_share = 1.0
        self.chance, self.lift = np.zeros(1, np.float32), np.zeros(1)

    cdef void _remove(self, int32_t slot) noexcept nogil:
        cdef int i
        for i in range(self.num_ahead):
            if self.slot[i] == slot:
                self.num_ahead -= 1
                self.slot[i], self.owner[i] = self.slot[self.num_ahead], self.owner[self.num_ahead]
                return

    cdef void used(self, int32_t slot, bint in_time) noexcept nogil:
        self._remove(slot)
        if in_time:
            self.useful += 1
        else:
            self.late += 1
        self.useful_share += USEFUL_DECAY * (1 - self.useful_share)

    cdef void _waste(self) noexcept nogil:
        self.wasted += 1
        self.useful_share -= USEFUL_DECAY * self.useful_share

    cdef void lost(self, int32_t slot, bint landed) noexcept nogil:
        # Its slot went to another expert, or its copy failed.
        self._remove(slot)
        self._waste()
        if not landed:
            self.dropped += 1

    cdef void settle(self, Core core, int64_t owner, Step step) noexcept:
        # The layer has come: what was fetched for it and not asked for was wrong. What is still on its way is dropped.
        cdef int n = 0, i
        cdef int32_t slot
        for i in range(self.num_ahead):
            slot = self.slot[i]
            if self.owner[i] == owner and core.gid_layer[core.slot_gid[slot]] == step.layer:
                self._reject(core, slot, step.plan)
                continue
            self.slot[n], self.owner[n] = slot, self.owner[i]
            n += 1
        self.num_ahead = n

    cdef void _reject(self, Core core, int32_t slot, Plan plan) noexcept:
        self._waste()
        core.speculative[slot] = 0
        if not core._is_complete(slot):
            self.dropped += 1
            plan.drop(slot, core.generation[slot])
            core._discard(slot)

    cdef void forget(self, Core core, int64_t owner) noexcept:
        # The request ended: nobody waits for its prefetches any more. One still in flight lands and is an ordinary
        # tenant then.
        cdef int n = 0, i
        for i in range(self.num_ahead):
            if self.owner[i] == owner:
                self._waste()
                core.speculative[self.slot[i]] = 0
                continue
            self.slot[n], self.owner[n] = self.slot[i], self.owner[i]
            n += 1
        self.num_ahead = n

    cdef void _forecast(self, Core core, RequestState request, Step step, int32_t target) noexcept:
        # Chance that each expert of the layer after this one is used. The odds of its own chance are multiplied by how
        # much more often than usual it followed each expert just routed; that product counts the same evidence several
        # times, as experts of one token go together, and is tempered (docs/policies.md has the calibration). The mean of
        # the transitions is a lower bound, for what follows surely although it is rare.
        cdef HistoryStore store = core.store
        cdef int32_t e, source = store.layer_offset[step.layer], begin = store.layer_offset[target]
        cdef int32_t count = store.experts[target], expert
        cdef int i
        cdef double scale, odds
        cdef const uint32_t *table = &store.transition_view[store.transition_offset[step.layer]]
        cdef const uint32_t *row
        if self.chance.shape[0] < count:
            self.chance, self.lift = np.zeros(count, np.float32), np.zeros(2 * count)
        if core.policy == MOE_INFINITY:
            for e in range(count):
                self.chance[e] = min(request.ratio(begin + e, target) * step.k, <float> 1.0)
            return
        for e in range(count):
            self.chance[e] = 0
        for i in range(step.unique):
            expert = step.experts[i]
            row = &table[<int64_t> expert * count]
            scale = 1 / (store.origin_view[source + expert] + TRANSITION_PRIOR) / step.unique
            for e in range(count):
                self.chance[e] += scale * (row[e] + TRANSITION_PRIOR * core.use[begin + e])
        moe_lift(&self.lift[0], &self.lift[count], <const int32_t *> table, <const int32_t *> &store.origin_view[source],
                 <const int32_t *> &store.origin_view[begin], count, step.experts, step.unique, step.k, TRANSITION_PRIOR)
        for e in range(count):
            odds = core.use[begin + e] / (1.0001 - core.use[begin + e]) * pow(self.lift[e], TEMPER / sqrt(step.unique))
            if self.chance[e] < CHANCE_WANTED:
                self.chance[e] = odds / (1 + odds)
            else:
                self.chance[e] = max(self.chance[e], odds / (1 + odds))

    cdef int _pick(self, Core core, int32_t target, int budget, int32_t *picked) noexcept nogil:
        # Experts of the target that are not resident and likely enough, the likeliest first.
        cdef int32_t begin = core.layer_offset[target], e, best
        cdef int i, n = 0
        for i in range(budget):
            best = -1
            for e in range(core.store.experts[target]):
                if core.gid_slot[begin + e] < 0 and self.chance[e] >= CHANCE_WANTED:
                    if best < 0 or self.chance[e] > self.chance[best]:
                        best = e
            if best < 0:
                break
            picked[n] = best
            self.chance[best] = -self.chance[best]   # taken; the sign is turned back by the caller
            n += 1
        return n

    cdef void plan(self, Core core, RequestState request, Step step) noexcept:
        """Queue prefetches for the layer that comes next, where that is worth a transfer."""
        cdef int32_t target = step.layer + 1 if step.layer + 1 < core.num_layers else 0
        cdef int32_t kind = core.layer_kind[target], begin = core.layer_offset[target], slot, victim = 0
        cdef int32_t[MAX_AHEAD] picked
        cdef float chance
        cdef int i, n, budget = min(step.k, MAX_AHEAD - self.num_ahead)
        # A pool smaller than one token's experts has no room for guesses; neither has a step that touches many tokens'
        # worth.
        if not self.enabled or step.unique > 2 * step.k or core.num_layers < 2:
            return
        if not core.num_layers * step.k <= core.num_slots < core.num_gids:
            return
        if self.useful_share < USEFUL_FLOOR and <uint32_t> (core.steps * 2654435761) >> 28:
            return
        self._forecast(core, request, step, target)
        n = self._pick(core, target, budget, picked)
        if n == 0:
            return
        core._find_victims(kind, n, step.layer, False)
        for i in range(n):
            chance = -self.chance[picked[i]]
            if core.vacant_count[kind]:
                core.vacant_count[kind] -= 1
                slot = core.vacant[core.slot_begin[kind] + core.vacant_count[kind]]
            elif victim < core.found.size and core._lateness(core.slot_gid[core.found.slots[victim]], step.layer) > (
                    1 + core.num_layers * (1 / chance - 1 + MARGIN_TOKENS)):
                slot = core.found.slots[victim]
                victim += 1
            else:
                return
            core._assign(slot, begin + picked[i], step.plan)
            core.speculative[slot] = 1
            step.plan.prefetch(begin + picked[i], slot, core.generation[slot], chance)
            self.slot[self.num_ahead], self.owner[self.num_ahead] = slot, request.number
            self.num_ahead += 1
            self.issued += 1

    cdef void inherit(self, Prefetcher old) noexcept:
        self.issued, self.useful, self.late = old.issued, old.useful, old.late
        self.wasted, self.dropped, self.useful_share = old.wasted + old.num_ahead, old.dropped, old.useful_share

    cdef dict counters(self):
        return {"prefetch_issued": self.issued, "prefetch_useful": self.useful, "prefetch_late": self.late,
                "prefetch_wasted": self.wasted, "prefetch_dropped": self.dropped}

    cdef void reset_counters(self) noexcept:
        self.issued = self.useful = self.late = self.wasted = self.dropped = 0
