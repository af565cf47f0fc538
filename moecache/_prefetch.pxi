# Included by _core.pyx: which experts of coming layers to fetch ahead, and how that turned out.

cdef enum:
    MAX_AHEAD = 64   # prefetches on their way or not used yet
    MAX_DEPTH = 8    # layers ahead that are looked at
    MAX_WISHES = 32  # experts among which a step chooses

# From which chance on an expert is worth moving ahead of its layer (docs/policies.md has the replays behind the
# numbers): while nobody has said how fast layers and link are, and then. The victim's next use must be expected this
# many tokens later. One under way is dropped when its chance falls to this share of what a new one needs. A resident
# expert as likely as this in a coming layer is no victim.
cdef float CHANCE_BLIND = 0.5, CHANCE_WANTED = 0.2
cdef float MARGIN_TOKENS = 1.0
cdef float DROPPED = 0.5
cdef float SHIELDED = 0.5
# Exponent of the joint evidence of k experts, times sqrt(k): between counting it once (1 / k) and k times (1). Chosen by
# calibration. The mean of the transitions is believed as it stands from even odds on.
cdef double TEMPER = 1.0
cdef float SURE = 0.5
# Share of prefetches that must prove useful, measured over about the last 64, where not more is needed to break even;
# below it only one step in 64 still tries, picked by a hash (Knuth's multiplicative one) so that it is not always the
# same layer's.
cdef float USEFUL_FLOOR = 0.2
cdef double USEFUL_DECAY = 1.0 / 64
cdef uint32_t HASH = 2654435761
# Experts' worth of waste that may be saved up while nothing is wasted.
cdef double CREDIT_ROOM = 32.0
# By which factor one sample moves the running median of the layer time.
cdef double PACE_STEP = 1.05

cdef struct Ahead:
    # A prefetch that is on its way, or has landed and was not asked for yet.
    int32_t slot, gid
    int64_t owner         # the request
    float chance, left    # that it is asked for; the share of its bytes still to move, by the measured pace


cdef struct Wish:
    # An expert without a slot that a coming layer may use.
    int32_t gid, distance
    float chance


@cython.final
cdef class Hints:
    """What somebody who knows more says of a request's coming layers: chances by gid, and of which layers they are."""

    cdef float[::1] chance
    cdef uint8_t[::1] given

    def __cinit__(self, HistoryStore store):
        self.chance, self.given = np.zeros(store.num_gids, np.float32), np.zeros(store.num_layers, np.uint8)

    cdef void give(self, int32_t layer, int32_t begin, const float[::1] chances) noexcept nogil:
        cdef Py_ssize_t e
        for e in range(chances.shape[0]):
            self.chance[begin + e] = chances[e]
        self.given[layer] = 1


@cython.final
cdef class Prefetcher:
    """Prefetches on their way or not used yet, what they may cost, and how they turned out."""

    cdef bint enabled
    cdef int32_t top_k, size, num_wishes, wishes_wanted
    cdef Ahead[MAX_AHEAD] ahead   # exactly those marked speculative
    cdef Wish[MAX_WISHES] wish    # the likeliest first
    cdef int64_t issued, useful, late, wasted, dropped
    cdef double useful_share, waste_share, credit
    # Seconds as measured; how many experts the link could move in a layer step's time; the chance from which on moving one
    # ahead surely pays, and the useful share from which on it does.
    cdef double layer_s, expert_s, chunk_s, idle, break_even, floor
    cdef float[::1] chance
    cdef double[::1] lift

    def __cinit__(self, int32_t top_k, bint enabled, int32_t widest, double waste_share):
        self.enabled, self.top_k, self.waste_share = enabled, top_k, waste_share
        self.useful_share = 1.0
        self.credit, self.floor = CREDIT_ROOM, USEFUL_FLOOR
        self.chance, self.lift = np.zeros(widest, np.float32), np.zeros(2 * widest)

    cdef void pace(self, double layer_s, double expert_s, double chunk_s) noexcept nogil:
        # A median is not moved by the pause between two requests, nor by the one slow layer of a pass.
        if expert_s > 0:
            self.expert_s, self.chunk_s = expert_s, chunk_s
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

    cdef int _find(self, int32_t slot) noexcept nogil:
        cdef int i
        for i in range(self.size):
            if self.ahead[i].slot == slot:
                return i
        return -1

    cdef void _remove(self, int i) noexcept nogil:
        # They stay in the order in which they were asked for: so they travel.
        self.size -= 1
        memmove(&self.ahead[i], &self.ahead[i + 1], (self.size - i) * sizeof(Ahead))

    cdef void needed(self, double experts) noexcept nogil:
        # What steps needed moved, whoever moved it, is what waste is measured against.
        self.credit = min(self.credit + self.waste_share * experts, CREDIT_ROOM)

    cdef void used(self, int32_t slot, bint in_time) noexcept nogil:
        cdef int i = self._find(slot)
        if in_time:
            self.useful += 1
            self.needed(1)
        else:
            self.late += 1
        self.useful_share += USEFUL_DECAY * (1 - self.useful_share)
        if i >= 0:
            self._remove(i)

    cdef void _waste(self, int i, bint landed) noexcept nogil:
        # One that has not begun costs nothing and shows nothing. Of one under way a chunk is on the link: half of it by
        # now, all of it in the end.
        cdef double moved = 1 - self.ahead[i].left
        if landed:
            moved = 1
        elif moved > 0 and self.expert_s > 0:
            moved = min(1, moved + 0.5 * self.chunk_s / self.expert_s)
        self.wasted += 1
        self.dropped += not landed
        self.credit -= moved
        if moved > 0:
            self.useful_share -= USEFUL_DECAY * self.useful_share
        self._remove(i)

    cdef void lost(self, int32_t slot, bint landed) noexcept nogil:
        # Its slot went to another expert, or its copy failed.
        cdef int i = self._find(slot)
        if i >= 0:
            self._waste(i, landed)

    cdef int _give_up(self, Core core, int i, Plan plan) except -1:
        cdef int32_t slot = self.ahead[i].slot
        cdef bint landed = core._is_complete(slot)
        core.speculative[slot] = 0
        self._waste(i, landed)
        if not landed:
            plan.drop(slot, core.generation[slot])
            core._discard(slot)
        return 0

    cdef int settle(self, Core core, int64_t owner, Step step) except -1:
        # The layer has come: what was fetched for it and not asked for was wrong. What is still on its way is dropped.
        cdef int i
        self._move(core)
        for i in range(self.size - 1, -1, -1):
            if self.ahead[i].owner == owner and core.gid_layer[self.ahead[i].gid] == step.layer:
                self._give_up(core, i, step.plan)
        return 0

    cdef void forget(self, Core core, int64_t owner) noexcept:
        # The request ended: nobody waits for its prefetches any more. One still in flight lands and is an ordinary
        # tenant then.
        cdef int i
        for i in range(self.size - 1, -1, -1):
            if self.ahead[i].owner == owner:
                core.speculative[self.ahead[i].slot] = 0
                self._waste(i, True)

    # What is known of coming layers

    cdef const float *forecast(self, Core core, RequestState request, Step step, int32_t target, int distance) noexcept:
        """Chance that the request uses each expert of `target`, `distance` layer steps from now."""
        if request.hints is not None and request.hints.given[target]:
            return &request.hints.chance[core.layer_offset[target]]
        if request.forecast is not None and distance <= request.forecast.weights.distances and step.tokens == 1:
            return request.forecast.ahead(step.layer, distance, step.ids, step.k)
        if core.policy == MOE_INFINITY:
            self._matched(core, request, step, target)
        elif distance == 1:
            self._follow(core, step, target)
        else:
            return &core.use[core.layer_offset[target]]
        return &self.chance[0]

    cdef void _matched(self, Core core, RequestState request, Step step, int32_t target) noexcept nogil:
        cdef int32_t e, begin = core.layer_offset[target]
        for e in range(core.store.experts[target]):
            self.chance[e] = min(request.ratio(begin + e, target) * step.k, <float> 1.0)

    cdef void _follow(self, Core core, Step step, int32_t target) noexcept:
        # The layer after this one. The odds of its own chance are multiplied by how much more often than usual it
        # followed each expert just routed; that product counts the same evidence several times, as experts of one token
        # go together, and is tempered (docs/policies.md has the calibration). The mean of the transitions is a lower
        # bound, for what follows surely although it is rare.
        cdef HistoryStore store = core.store
        cdef int32_t source = store.layer_offset[step.layer], begin = store.layer_offset[target]
        cdef int32_t count = store.experts[target]
        cdef const int32_t *table = <const int32_t *> &store.transition_view[store.transition_offset[step.layer]]
        cdef const int32_t *origins = <const int32_t *> &store.origin_view[source]
        moe_lift(&self.lift[0], &self.lift[count], table, origins, <const int32_t *> &store.origin_view[begin], count,
                 step.experts, step.unique, step.k, TRANSITION_PRIOR)
        moe_follow(&self.chance[0], &core.use[begin], &self.lift[0], table, origins, count, step.experts, step.unique,
                   TRANSITION_PRIOR, TEMPER / sqrt(step.unique), SURE)

    # Which to move

    cdef bint _may(self, Core core, Step step) noexcept nogil:
        # A pool smaller than one token's experts has no room for guesses; neither has a step that touches many tokens'
        # worth.
        if not self.enabled or step.unique > 2 * step.k or core.num_layers < 2:
            return False
        if not core.num_layers * step.k <= core.num_slots < core.num_gids:
            return False
        return self.useful_share >= self.floor or (<uint32_t> core.steps * HASH) >> 26 == 0

    cdef int plan(self, Core core, RequestState request, Step step) except -1:
        """Queue prefetches for coming layers, where that is worth a transfer, and drop those that no longer are."""
        cdef double idle = step.k
        cdef float least = CHANCE_BLIND
        cdef int depth = 1, n
        if not self._may(core, step):
            return 0
        if self.idle > 0:
            idle = self.idle
            least = max(CHANCE_WANTED, self.break_even)
            depth = min(MAX_DEPTH, core.num_layers - 1)
        self.num_wishes, self.wishes_wanted = 0, min(MAX_WISHES, MAX_AHEAD - self.size)
        self._rank(core, request, step, depth, least)
        n = self._select(MAX_AHEAD - self.size, idle)
        if n:
            self._queue(core, request, step, n)
        return 0

    cdef void _move(self, Core core) noexcept nogil:
        # What the link will have moved since the last step, one after another.
        cdef int i
        cdef double idle = self.idle
        cdef float moved
        for i in range(self.size):
            if core._is_complete(self.ahead[i].slot):
                self.ahead[i].left = 0
            moved = min(self.ahead[i].left, <float> idle)
            self.ahead[i].left -= moved
            idle -= moved

    cdef int _rank(self, Core core, RequestState request, Step step, int depth, float least) except -1:
        # The likeliest experts of the coming layers that have no slot. What is under way for them is known better now: one
        # that has become unlikely is dropped.
        cdef int d, i
        cdef int32_t target = step.layer, begin, count, e
        cdef const float *chance
        for d in range(1, depth + 1):
            target = target + 1 if target + 1 < core.num_layers else 0
            begin, count = core.layer_offset[target], core.store.experts[target]
            chance = self.forecast(core, request, step, target, d)
            for i in range(self.size - 1, -1, -1):
                e = self.ahead[i].gid - begin
                if self.ahead[i].owner == request.number and 0 <= e < count and chance[e] < DROPPED * least and not (
                        core._is_complete(self.ahead[i].slot)):
                    self._give_up(core, i, step.plan)
            for e in range(count):
                if chance[e] < least:
                    continue
                if core.gid_slot[begin + e] < 0:
                    self._offer(Wish(begin + e, d, chance[e]))
                elif chance[e] >= SHIELDED:
                    core.wanted_until[begin + e] = core.steps + d
        return 0

    cdef void _offer(self, Wish wish) noexcept nogil:
        cdef int i
        if self.num_wishes == self.wishes_wanted:
            if self.num_wishes == 0 or wish.chance <= self.wish[self.num_wishes - 1].chance:
                return
            self.num_wishes -= 1
        i = self.num_wishes
        while i > 0 and self.wish[i - 1].chance < wish.chance:
            self.wish[i] = self.wish[i - 1]
            i -= 1
        self.wish[i] = wish
        self.num_wishes += 1

    cdef int _select(self, int wanted, double idle) noexcept nogil:
        # Of the wishes those that the link can begin before the next step, the likeliest first; returns how many. The link
        # must have idle time for a part of one before its layer comes, after all that is under way: a demand joins what has
        # begun. Later ones are left to the next step: it knows more, and a slot is not held meanwhile.
        cdef double queued = 0, risk = 0
        cdef int i, n = 0
        for i in range(self.size):
            queued += self.ahead[i].left
            if self.ahead[i].left > 0:
                risk += 1 - self.ahead[i].chance
        for i in range(self.num_wishes):
            if queued >= idle or n == wanted:
                break
            if self.wish[i].distance * idle <= queued or risk + 1 - self.wish[i].chance > self.credit:
                continue
            risk += 1 - self.wish[i].chance
            queued += min(1, self.wish[i].distance * idle - queued)
            self.wish[n] = self.wish[i]
            n += 1
        return n

    cdef int _queue(self, Core core, RequestState request, Step step, int n) except -1:
        cdef int32_t kind, slot, victim
        cdef int i, wanted
        cdef Wish *wish
        for kind in range(core.num_kinds):
            wanted = 0
            for i in range(n):
                wanted += core.layer_kind[core.gid_layer[self.wish[i].gid]] == kind
            if wanted == 0:
                continue
            core.found.clear(0)
            if wanted > core.vacant_count[kind]:
                core._find_victims(kind, wanted - core.vacant_count[kind], step.layer, False)
            victim = 0
            for i in range(n):
                wish = &self.wish[i]
                if core.layer_kind[core.gid_layer[wish.gid]] != kind:
                    continue
                if core.vacant_count[kind]:
                    core.vacant_count[kind] -= 1
                    slot = core.vacant[core.slot_begin[kind] + core.vacant_count[kind]]
                elif victim < core.found.size and core._lateness(core.slot_gid[core.found.slots[victim]], step.layer) > (
                        wish.distance + core.num_layers * (1 / wish.chance - 1 + MARGIN_TOKENS)):
                    slot = core.found.slots[victim]
                    victim += 1
                else:
                    break
                self._start(core, request, wish, slot, step.plan)
        return 0

    cdef int _start(self, Core core, RequestState request, Wish *wish, int32_t slot, Plan plan) except -1:
        core._assign(slot, wish.gid, plan)
        core.speculative[slot] = 1
        self.ahead[self.size] = Ahead(slot, wish.gid, request.number, wish.chance, 1)
        self.size += 1
        self.issued += 1
        return plan.prefetch(wish.gid, slot, core.generation[slot], 0)

    cdef void inherit(self, Core core, Prefetcher old) noexcept:
        # Prefetches that no step has asked for yet go on, but for those that got no slot any more.
        cdef int i
        cdef int32_t slot
        self.issued, self.useful, self.late = old.issued, old.useful, old.late
        self.wasted, self.dropped, self.useful_share = old.wasted, old.dropped, old.useful_share
        for i in range(old.size):
            slot = core.gid_slot[old.ahead[i].gid]
            if slot < 0:
                self.wasted += 1
                continue
            core.speculative[slot] = 1
            self.ahead[self.size] = old.ahead[i]
            self.ahead[self.size].slot = slot
            self.size += 1
        self.credit, self.layer_s, self.expert_s, self.chunk_s = old.credit, old.layer_s, old.expert_s, old.chunk_s
        self.idle, self.break_even, self.floor = old.idle, old.break_even, old.floor

    cdef dict counters(self):
        return {"prefetch_issued": self.issued, "prefetch_useful": self.useful, "prefetch_late": self.late,
                "prefetch_wasted": self.wasted, "prefetch_dropped": self.dropped, "prefetch_pending": self.size}

    cdef void reset_counters(self) noexcept:
        # What is on its way or unused counts as issued in the new period: it will end there, one way or another.
        self.useful = self.late = self.wasted = self.dropped = 0
        self.issued = self.size
