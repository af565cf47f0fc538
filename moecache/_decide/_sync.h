/* What threads share without the GIL: the clock, numbers written by another thread, and a sequence of events to wait for. */
#ifndef MOECACHE_SYNC_H
#define MOECACHE_SYNC_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

static inline int32_t moe_load_acquire(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

static inline int64_t moe_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

/* A sequence of events that threads wait for without the GIL. Who notifies of one holds the GIL. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t number;   /* of the last event */
    int32_t waiters;  /* threads that wait; written with the GIL */
    pid_t pid;        /* of the process that made it */
} moe_events;

static inline void moe_events_init(moe_events *e) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, &attr);
    pthread_condattr_destroy(&attr);
    e->number = 0;
    e->waiters = 0;
    e->pid = getpid();
}

static inline void moe_events_destroy(moe_events *e) {
    if (e->pid != getpid()) return; /* a forked copy: its lock may be held by a thread that is not here */
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
}

static inline void moe_events_notify(moe_events *e) {
    __atomic_add_fetch(&e->number, 1, __ATOMIC_RELEASE);
    if (e->waiters == 0 || e->pid != getpid()) return;
    pthread_mutex_lock(&e->lock); /* a waiter has read the number already, or is asleep */
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

static inline int64_t moe_events_number(moe_events *e) { return __atomic_load_n(&e->number, __ATOMIC_ACQUIRE); }

static inline void moe_events_await(moe_events *e, int64_t seen, int64_t deadline_ns) {
    struct timespec t = {deadline_ns / 1000000000, deadline_ns % 1000000000};
    pthread_mutex_lock(&e->lock);
    while (moe_events_number(e) == seen && pthread_cond_timedwait(&e->changed, &e->lock, &t) == 0) {}
    pthread_mutex_unlock(&e->lock);
}

#endif
