"""What puts the parts of a decision together: a step is counted, judged against the cache as it stands, and what to move is planned.

A decision keeps the GIL, which is what makes it atomic between Python threads. The long loops before it release it: the copying and
grouping of a long prompt's ids, which touch nothing shared, and the scan of a large store, which reads it under a lock that writers
wait for.
"""

import cython
import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t

from moecache.errors import ClosedError, LeaseError, RoutingError, refuse_copy

from moecache._decide.arrays cimport address_of
from moecache._decide.batch cimport BatchState
from moecache._decide.dispatch cimport Dispatcher
from moecache._decide.estimates cimport Estimates
from moecache._decide.evict cimport EXPECTED_NEXT_USE, Evictor
from moecache._decide.history cimport HistoryStore
from moecache._decide.prefetch cimport Prefetcher
from moecache._decide.request cimport RequestState
from moecache._decide.slots cimport PrefetchLedger, SlotTable
from moecache._decide.step cimport Account, OpenSteps, Step
from moecache._decide.sync cimport moe_now_ns


@cython.final
cdef class Core:
    """Decides about the experts of one cache.

    Parameters
    ----------
    store : HistoryStore
    layer_group : int32 array [L]
        Shape group of each layer.
    slots_per_group : int32 array [groups]
        Slot numbers run through the shape groups in order.
    complete : int32 array [slots]
        Written by whoever moves the bytes: the generation of the occupant whose bytes are all there, negative when its copy
        failed.
    policy : str
        A key of `POLICY_CODES`.
    score : int, optional
        Address of a ``double (const double *features)`` for policy "user"; the largest score is evicted.
    prefetch : bool
    top_k : int
        Experts per token, where known, else 0.
    waste_share : float
        Prefetched for nothing at most, as a share of what steps needed moved.

    Raises
    ------
    PolicyError
        The policy is not known, or has no score or one too many.
    """

    def __cinit__(self, HistoryStore store, layer_group, slots_per_group, complete, str policy="expected-next-use",
                  uintptr_t score=0, bint prefetch=True, int32_t top_k=0, double waste_share=0.25):
        self.store, self.layout = store, store.layout
        self.slots = SlotTable(store.layout, layer_group, slots_per_group, complete, PrefetchLedger(waste_share))
        self.estimates = Estimates(store, top_k)
        self.evictor = Evictor(self.slots, self.estimates, policy, score)
        self.prefetcher = Prefetcher(self.evictor, store.transitions, prefetch and policy != "belady", policy == "moe-infinity")
        self.open_steps = OpenSteps(self.slots)
        self.dispatcher = Dispatcher(self.evictor, self.open_steps)
        self.layer_demands, self.layer_hits = (np.zeros(store.layout.num_layers, np.int64) for _ in range(2))
        self.demands_of, self.hits_of = (
            <int64_t *> address_of(self.layer_demands), <int64_t *> address_of(self.layer_hits))
        self.requests, self.batches = [], []

    def __reduce__(self):
        refuse_copy(self)

    # Requests

    def begin_request(self):
        """Start counting a request; end it with `end_request`. None when another core has taken this one's place.

        Raises
        ------
        ClosedError
        """
        if self.closed:
            raise ClosedError("this cache is closed; make a new one")
        if self.successor is not None:
            return None
        cdef RequestState request = RequestState(self.store, self.request_number)
        request.start(self.estimates.prior)
        if self.evictor.policy == EXPECTED_NEXT_USE and self.store.forecaster is not None:
            request.attach_forecaster(self.store.forecaster)
        self.request_number += 1
        self.requests.append(request)
        self.store.matches.append(request.match)
        self._predict_all(request)
        self._refresh_all()
        return request

    def end_request(self, RequestState request, bint keep=True):
        """Take a request out of the chances of use and, with `keep`, put its activation matrix into the store.

        Its open steps end. A request that another thread is routing at this moment ends when that call does.

        Returns
        -------
        bool
            False when another core has taken this one's place, and has the request.
        """
        if self.successor is not None:
            return False
        if request not in self.requests:
            return True
        if request.busy:
            request.ending = 2 if keep else 1
            return True
        self.open_steps.close_all(request)
        self.open_steps.begin_decision()
        try:
            self._end_request(request, keep)
        finally:
            self.open_steps.end_decision()
        return True

    cdef int _end_request(self, RequestState request, bint keep) except -1:
        self.requests.remove(request)
        self.requests_ns += request.account.last_ns - request.account.begun_ns
        self.store.matches.remove(request.match)
        request.predictor.finish()
        self.prefetcher.forget(request.account.number)
        if self.evictor.current is request:
            self.evictor.current = None
        if keep:
            self.store.add(request.match.prompt_counts, request.match.decode_counts,
                           request.prompt_tokens + request.decode_tokens, request.match)
            self.estimates.refresh_prior()
        self.finished += 1
        for request in self.requests:
            self._predict_all(request)
        self._refresh_all()
        return 0

    def begin_batch(self):
        """Start a batch; end it with `end_batch`. None when another core has taken this one's place.

        Raises
        ------
        ClosedError
        """
        if self.closed:
            raise ClosedError("this cache is closed; make a new one")
        if self.successor is not None:
            return None
        cdef BatchState batch = BatchState(self.layout.widest, self.request_number)
        self.request_number += 1
        self.batches.append(batch)
        return batch

    def end_batch(self, BatchState batch):
        """End a batch's open steps; its requests go on.

        Returns
        -------
        bool
            False when another core has taken this one's place, and has the batch.
        """
        if self.successor is not None:
            return False
        if batch in self.batches:
            self.open_steps.close_all(batch)
            self.batches.remove(batch)
            self.requests_ns += batch.account.last_ns - batch.account.begun_ns
            self.prefetcher.forget(batch.account.number)
        return True

    cdef void _predict_all(self, RequestState request) noexcept:
        cdef int32_t layer
        for layer in range(self.layout.num_layers):
            request.predict(layer, self.estimates.prior, request.previous_k)

    cdef void _refresh_layer(self, int32_t layer) noexcept:
        self.estimates.refresh_layer(self.requests, layer)
        self.evictor.refresh_layer(layer)

    cdef void _refresh_all(self) noexcept:
        cdef int32_t layer
        for layer in range(self.layout.num_layers):
            self._refresh_layer(layer)

    # One step

    def route(self, RequestState request, int32_t layer, uintptr_t ids, int itemsize, Py_ssize_t tokens, int k,
              Py_ssize_t row_stride, Py_ssize_t column_stride, bint decode, uintptr_t token_mask=0, int64_t padding_id=-1):
        """Count a step, judge it against the cache as it stands, and plan what to move.

        Parameters
        ----------
        request : RequestState
        layer : int
        ids : int
            Address of the router's choice, ``[tokens, k]``; -1 and `padding_id` stand for no expert.
        itemsize : int
            Bytes of an id: 8, 4, 2, 1 signed; -1 for uint8.
        row_stride, column_stride : int
            In elements.
        decode : bool
            Count as decode rather than prompt.
        token_mask : int
            Address of a bool per token, or 0: False for rows that are computed but not counted.

        Returns
        -------
        Step or None
            None when another core has taken this one's place; while this one is frozen, or its slot table is worn, unless
            this thread has a step open.

        Raises
        ------
        RoutingError
            The layer or an id is out of range, or another thread is routing this request. Nothing has changed.
        ClosedError
            The core is closed, or the request has ended.
        MemoryError
            What was pinned is unpinned; the next step of the layer asks again for what was not moved.
        """
        cdef Step step
        cdef int64_t begun = moe_now_ns()
        if self._waits():
            return None
        self.layout.check_layer(layer)
        if request.busy:
            raise RoutingError(f"layer {layer}: another thread is routing this request; give each thread a request of its own")
        step = Step(layer, tokens, k, decode, self.layout.experts[layer])
        self.open_steps.routing += 1
        request.busy = True
        try:
            step.read(<const char *> ids, itemsize, row_stride, column_stride, <const uint8_t *> token_mask, padding_id,
                      self.store.gil)
            self._decide(request, step)
        finally:
            request.busy = False
            self.open_steps.routing -= 1
            if self.frozen:
                self.open_steps.notify()
            if request.ending:
                self._end_late(request)
        step.plan.export()
        self.deciding_ns += moe_now_ns() - begun
        return step

    def route_batch(self, BatchState batch, list requests, list rows, list decodes, int32_t layer, uintptr_t ids, int itemsize,
                    int k, Py_ssize_t row_stride, Py_ssize_t column_stride, uintptr_t token_mask=0, int64_t padding_id=-1):
        """As `route`, for a step whose rows belong to several requests.

        Parameters
        ----------
        batch : BatchState
        requests : list of RequestState or None
            Whose the rows are, in their order. None: rows that are computed, and that `token_mask` says not to count.
        rows : list of int
            Rows of each.
        decodes : list of bool
            For each whether to count its rows as decode rather than prompt.

        Other parameters, what is returned and what is raised are those of `route`; where a request is named twice, another
        thread is routing one, or one has ended, nothing has changed.
        """
        cdef Step step
        cdef RequestState request
        cdef int64_t begun = moe_now_ns()
        if self._waits():
            return None
        self.layout.check_layer(layer)
        step = Step(layer, sum(rows), k, all(decodes), self.layout.experts[layer])
        batch.hold(requests)
        self.open_steps.routing += 1
        try:
            step.read(<const char *> ids, itemsize, row_stride, column_stride, <const uint8_t *> token_mask, padding_id,
                      self.store.gil)
            batch.split(step, requests, rows, decodes)
            self._decide_batch(batch, step)
        finally:
            batch.let_go()
            self.open_steps.routing -= 1
            if self.frozen:
                self.open_steps.notify()
            for request in filter(None, requests):
                if request.ending:
                    keep, request.ending = request.ending == 2, 0
                    self.end_request(request, keep)
        step.plan.export()
        self.deciding_ns += moe_now_ns() - begun
        return step

    cdef bint _waits(self) except -1:
        # Whether a step is not to begin here, or not now.
        if self.closed:
            raise ClosedError("this cache is closed; make a new one")
        return self.successor is not None or ((self.frozen or self.slots.worn) and not self.open_steps.here())

    cdef int _decide_batch(self, BatchState batch, Step step) except -1:
        batch.count()   # may let others in; from here on nobody comes between
        self.open_steps.begin_decision()
        try:
            batch.observe(self.estimates.prior)
            self._observe_step(batch.first(), step)
            self.open_steps.open(step, batch, batch.account)
            if step.unique:
                batch.credit(self.slots)
                self.admit(step, batch.account)
                self.dispatcher.serve(step)
                if step.decode and batch.requests:
                    self.prefetcher.plan(None, batch, step)
            batch.record()
        finally:
            self.open_steps.end_decision()
        return 0

    cdef int _end_late(self, RequestState request) except -1:
        cdef bint keep = request.ending == 2
        request.ending = 0
        self.end_request(request, keep)
        raise ClosedError("this request was closed while another thread was routing it")

    cdef int _decide(self, RequestState request, Step step) except -1:
        request.count(step)   # may let others in; from here on nobody comes between
        self.open_steps.begin_decision()
        try:
            self.observe(request, step)
            self.open_steps.open(step, request, request.account)
            if step.unique:
                self.admit(step, request.account)
                self.dispatcher.serve(step)
                if step.decode:
                    self.prefetcher.plan(request, None, step)
            request.record(step)
        finally:
            self.open_steps.end_decision()
        return 0

    cdef int observe(self, RequestState request, Step step) except -1:
        """What a step shows, whatever the slots hold."""
        request.observe(step)
        request.predict(step.layer, self.estimates.prior, step.k)
        return self._observe_step(request, step)

    cdef int _observe_step(self, RequestState request, Step step) except -1:
        self.evictor.current = request
        self.estimates.observe(step)
        self.slots.steps += 1
        self.at_layer = step.layer
        if step.layer == 0:
            self.routed_tokens += step.counted_tokens
        self._refresh_layer(step.layer)
        return 0

    cdef int admit(self, Step step, Account account) except -1:
        """Classify every expert against the cache as it stood, and pin those already there so that none can be a victim
        of its own step."""
        self.dispatcher.admit(step)
        self.prefetcher.settle(account.number, step)
        self.slots.ledger.needed(step.missing)
        self.demands += step.unique
        self.hits += step.hits
        self.misses += step.missing
        self.demands_of[step.layer] += step.unique
        self.hits_of[step.layer] += step.hits
        account.demands += step.unique
        account.hits += step.hits
        return 0

    def release(self, Step step):
        """Unpin the step's slots. Harmless when called twice."""
        self.open_steps.close(step)

    def waited(self, Step step not None, double seconds, bint for_slot):
        """Count time that a lease has waited, for bytes or for a slot."""
        cdef int64_t ns = <int64_t> (seconds * 1e9)
        if step.handed_out_ns:
            step.waited_ns += ns
        if for_slot:
            self.slot_wait_ns += ns
            step.account.slot_wait_ns += ns
        else:
            self.stall_ns += ns
            step.account.stall_ns += ns

    # Handing over to another core

    def freeze(self):
        """From here on `route` begins a step only in threads that have one open."""
        self.frozen = True

    def thaw(self):
        """Undo `freeze`."""
        self.frozen = False
        self.open_steps.notify()

    def close(self):
        """End all requests and their steps; nothing begins any more."""
        self.closed = True   # first: whose step ends below learns why
        for request in list(self.requests):
            self.end_request(request)
        for batch in list(self.batches):
            self.end_batch(batch)
        self.open_steps.close_all(None)
        self.open_steps.notify()

    def retained(self, int32_t group, int32_t count):
        """int32 array: the slots of up to `count` complete, unpinned experts of a shape group, the most wanted first."""
        return self.evictor.retained(group, count, self.at_layer)

    def adopt(self, int32_t slot, int32_t gid):
        """Enter an expert whose bytes were put into a vacant slot by other means (after a resize).

        Raises
        ------
        LeaseError
            The slot is not vacant, or the expert has another.
        """
        self.evictor.place(slot, gid)

    def inherit(self, Core old not None, successor=None):
        """Take over another core's requests, recency, frequencies and counters; `successor` stands for this core.

        One call, so that no thread sees half of it: from its end on the old core begins nothing, `route`, `begin_request`
        and `end_request` say so, and `old.successor` leads here.

        Raises
        ------
        ClosedError
            The old core was closed meanwhile.
        LeaseError
            A step of the old core is open.
        """
        if old.closed:
            raise ClosedError("this cache is closed; make a new one")
        if old.open_steps.count():
            raise LeaseError("a step of the core to be replaced is open")
        self.requests, self.batches, self.request_number = old.requests, old.batches, old.request_number
        self.at_layer = old.at_layer
        self.layer_demands[:], self.layer_hits[:] = old.layer_demands, old.layer_hits
        self.demands, self.hits, self.misses = old.demands, old.hits, old.misses
        self.dispatcher.waves, self.finished, self.routed_tokens = old.dispatcher.waves, old.finished, old.routed_tokens
        self.deciding_ns, self.requests_ns, self.open_steps.computing_ns = (
            old.deciding_ns, old.requests_ns, old.open_steps.computing_ns)
        self.stall_ns, self.slot_wait_ns = old.stall_ns, old.slot_wait_ns
        self.estimates.inherit(old.estimates)
        self.slots.inherit(old.slots)
        self.prefetcher.inherit(old.prefetcher)
        self.estimates.refresh_prior()
        self._refresh_all()
        if successor is not None:
            old.successor, old.requests, old.batches, old.evictor.current = successor, [], [], None
            old.open_steps.notify()

    cdef void share_estimates(self, Core leader) noexcept:
        """Read a leader's estimates from here on: cores of a replay that differ only in slots make one observation serve all."""
        self.estimates = self.evictor.estimates = leader.estimates

    # Counters

    def counters(self):
        """dict of int: monotonic since the start or the last `reset_counters`."""
        cdef int64_t requests_ns = self.requests_ns
        cdef Account account
        for account in self._accounts():
            requests_ns += account.last_ns - account.begun_ns
        return {"demands": self.demands, "hits": self.hits, "misses": self.misses, "evictions": self.slots.evictions,
                "waves": self.dispatcher.waves, "steps": self.slots.steps, "tokens": self.routed_tokens, "requests": self.finished,
                "deciding_ns": self.deciding_ns, "computing_ns": self.open_steps.computing_ns, "stall_ns": self.stall_ns,
                "slot_wait_ns": self.slot_wait_ns, "requests_ns": requests_ns,
                **self.slots.ledger.counters()}

    cdef list _accounts(self):
        # Whose steps took time: requests on their own, and batches.
        return [request.account for request in self.requests] + [batch.account for batch in self.batches]

    def reset_counters(self):
        """Count from zero again."""
        cdef Account account
        cdef int64_t now = moe_now_ns()
        for account in self._accounts():
            account.begun_ns = account.last_ns = now
        self.demands = self.hits = self.misses = self.dispatcher.waves = self.finished = self.routed_tokens = 0
        self.deciding_ns = self.stall_ns = self.slot_wait_ns = self.requests_ns = 0
        self.open_steps.computing_ns = 0
        self.layer_demands[:] = 0
        self.layer_hits[:] = 0
        self.slots.reset_counters()
