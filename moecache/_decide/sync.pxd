# What threads share without the GIL (_sync.h).

from libc.stdint cimport int32_t, int64_t

cdef extern from "_sync.h" nogil:
    int32_t moe_load_acquire(const int32_t *p)
    int64_t moe_now_ns()
    ctypedef struct moe_events:
        int32_t waiters
    void moe_events_init(moe_events *)
    void moe_events_destroy(moe_events *)
    void moe_events_notify(moe_events *)
    int64_t moe_events_number(moe_events *)
    void moe_events_await(moe_events *, int64_t seen, int64_t deadline_ns)
