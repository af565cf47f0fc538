/* A CUDA runtime of threads: every stream executes what it is given in order, late, and beside the caller.
 *
 * Copies read and write when their stream has come that far, so a reader that does not wait gets what was there before.
 * Nothing of it needs a driver. The functions have the C signatures of those they are in place of; what a test needs beyond
 * them begins with fake_. Device memory is host memory.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_READY = 600,
       ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, CAPTURE_UNSUPPORTED = 900 };
enum { COPY, RECORD, WAIT, SUM, STOP };
enum { HOST_TO_DEVICE = 1, HOST_STREAM_LEGACY = 1, RELAXED = 2 };
/* Functions that can be made to fail. */
enum { F_MEMCPY, F_RECORD, F_QUERY, F_WAIT, F_SET_DEVICE, F_EXCHANGE, F_REGISTER, F_UNREGISTER, F_ALLOC, F_STREAM, F_EVENT,
       FUNCTIONS };

typedef struct Event { uint64_t issued, done; int device; } Event;

typedef struct Op {
    struct Op *next;
    int kind;
    Event *event;
    uint64_t version;
    unsigned char *target;
    const unsigned char *source;
    unsigned char *owned;      /* pageable memory is read at the call */
    size_t nbytes;
    uint64_t *sum;
} Op;

typedef struct Stream {
    int host;                  /* executes on the caller: waiting in it is waiting */
    int device, stopping, gated;
    unsigned seed, delay_us;
    Op *first, *last;
    pthread_t thread;
    struct Stream *next;
} Stream;

typedef struct Range { uintptr_t start, stop; struct Range *next; } Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams;
static Range *registered, *allocated;
static int devices = 2, codes[FUNCTIONS], after[FUNCTIONS], sticky, last_error, capturing, capture_broken;
static int64_t live_events, live_streams, violations, copies_locked, copies_pageable, registrations;
static size_t register_limit = (size_t)-1, register_total;
static __thread int current_device, capture_mode;

/* Some calls break what another thread captures, unless this thread has said that its calls do not concern that. */
static int unsafe(void) {
    if (!capturing || capture_mode == RELAXED) return SUCCESS;
    capture_broken = 1;
    return CAPTURE_UNSUPPORTED;
}

static int answer(int function) {
    if (sticky) return sticky;
    if (codes[function] && after[function]-- <= 0) return last_error = codes[function];
    return SUCCESS;
}

static Range *range_of(Range *ranges, uintptr_t at) {
    for (; ranges; ranges = ranges->next)
        if (ranges->start <= at && at < ranges->stop) return ranges;
    return NULL;
}

static int pending_from(uintptr_t start, uintptr_t stop) {
    for (Stream *s = streams; s; s = s->next)
        for (Op *op = s->first; op; op = op->next)
            if (op->kind == COPY && !op->owned && (uintptr_t)op->source < stop && start < (uintptr_t)op->source + op->nbytes)
                return 1;
    return 0;
}

static void execute(Op *op) {
    if (op->kind == COPY) memcpy(op->target, op->owned ? op->owned : op->source, op->nbytes);
    if (op->kind == SUM) {
        uint64_t sum = 0;
        for (size_t i = 0; i < op->nbytes; i++) sum = sum * 1099511628211u + op->source[i] + 1;
        *op->sum = sum;
    }
}

static void *run(void *argument) {
    Stream *s = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        Op *op = s->first;
        if (!op || s->gated || (op->kind == WAIT && op->event->done < op->version)) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (op->kind == STOP) break;
        unsigned pause = s->delay_us ? rand_r(&s->seed) % (2 * s->delay_us) : 0;
        pthread_mutex_unlock(&lock);
        if (pause && op->kind != WAIT) usleep(pause);
        execute(op);
        pthread_mutex_lock(&lock);
        if (op->kind == RECORD && op->event->done < op->version) op->event->done = op->version;
        s->first = op->next;
        if (!s->first) s->last = NULL;
        free(op->owned);
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static Op *give(Stream *s, Op op) {
    Op *own = malloc(sizeof *own);
    *own = op;
    own->next = NULL;
    if (s->last) s->last->next = own; else s->first = own;
    s->last = own;
    pthread_cond_broadcast(&changed);
    return own;
}

static Stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= HOST_STREAM_LEGACY) return NULL;
    for (Stream *s = streams; s; s = s->next) if (s == handle) return s;
    return NULL;
}

/* ---- the functions of the runtime */

int fake_memcpy_async(void *target, const void *source, size_t nbytes, int kind, void *handle) {
    pthread_mutex_lock(&lock);
    Stream *s = stream_of(handle);
    int code = answer(F_MEMCPY);
    uintptr_t at = (uintptr_t)source;
    Range *range = range_of(registered, at);
    if (!range) range = range_of(allocated, at);
    if (!code && (!s || s->device != current_device)) code = INVALID_HANDLE;
    if (!code && kind != HOST_TO_DEVICE) code = INVALID_VALUE;
    if (!code && range && range->stop < at + nbytes) code = INVALID_VALUE;
    if (!code) {
        Op op = {.kind = COPY, .target = target, .source = source, .nbytes = nbytes};
        if (range) copies_locked++; else copies_pageable++;
        if (!range) memcpy(op.owned = malloc(nbytes + 1), source, nbytes);
        give(s, op);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_event_record(void *handle, void *stream) {
    pthread_mutex_lock(&lock);
    int code = answer(F_RECORD);
    Event *event = handle;
    Stream *s = stream_of(stream);
    if (!code && event->device != (s ? s->device : current_device)) code = INVALID_HANDLE;
    if (!code) {
        uint64_t version = ++event->issued;
        if (s) give(s, (Op){.kind = RECORD, .event = event, .version = version});
        else { event->done = version; pthread_cond_broadcast(&changed); }
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_event_query(void *handle) {
    pthread_mutex_lock(&lock);
    int code = answer(F_QUERY);
    Event *event = handle;
    if (!code) code = unsafe();
    if (!code && event->done < event->issued) code = NOT_READY;
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_event_synchronize(void *handle) {
    pthread_mutex_lock(&lock);
    Event *event = handle;
    while (!sticky && event->done < event->issued) pthread_cond_wait(&changed, &lock);
    int code = sticky;
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_stream_wait_event(void *handle, void *event_handle, unsigned flags) {
    pthread_mutex_lock(&lock);
    int code = flags ? INVALID_VALUE : answer(F_WAIT);
    Event *event = event_handle;
    Stream *s = stream_of(handle);
    uint64_t version = event->issued;
    if (!code && !s && event->device != current_device) code = INVALID_HANDLE;   /* the default stream of another device */
    if (!code && s) give(s, (Op){.kind = WAIT, .event = event, .version = version});
    while (!code && !s && event->done < version) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_set_device(int device) {
    pthread_mutex_lock(&lock);
    int code = answer(F_SET_DEVICE);
    if (!code && (device < 0 || device >= devices)) code = last_error = INVALID_DEVICE;
    if (!code) current_device = device;
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_exchange_capture_mode(int *mode) {
    pthread_mutex_lock(&lock);
    int code = answer(F_EXCHANGE), before = capture_mode;
    if (!code) { capture_mode = *mode; *mode = before; }
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_host_register(void *address, size_t nbytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    int code = answer(F_REGISTER);
    if (!code) code = unsafe();
    uintptr_t start = (uintptr_t)address, stop = start + nbytes;
    for (Range *r = registered; r && !code; r = r->next)
        if (r->start < stop && start < r->stop) code = ALREADY_REGISTERED;
    if (!code && (!flags || start % 4096 || nbytes % 4096)) code = INVALID_VALUE;
    if (!code && nbytes > register_limit - register_total) code = OUT_OF_MEMORY;
    if (!code) {
        Range *r = malloc(sizeof *r);
        *r = (Range){start, stop, registered};
        registered = r;
        registrations++;
        register_total += nbytes;
    } else last_error = code;
    pthread_mutex_unlock(&lock);
    return code;
}

static int drop_range(Range **ranges, uintptr_t start) {
    for (Range **r = ranges; *r; r = &(*r)->next)
        if ((*r)->start == start) {
            Range *gone = *r;
            if (pending_from(gone->start, gone->stop)) violations++;
            if (ranges == &registered) { registrations--; register_total -= gone->stop - gone->start; }
            *r = gone->next;
            free(gone);
            return SUCCESS;
        }
    return last_error = NOT_REGISTERED;
}

int fake_host_unregister(void *address) {
    pthread_mutex_lock(&lock);
    int code = answer(F_UNREGISTER);
    if (!code) code = unsafe();
    if (!code) code = drop_range(&registered, (uintptr_t)address);
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_host_alloc(void **address, size_t nbytes) {
    pthread_mutex_lock(&lock);
    int code = answer(F_ALLOC);
    if (!code) code = unsafe();
    if (!code && posix_memalign(address, 4096, nbytes)) code = OUT_OF_MEMORY;
    if (!code) {
        Range *r = malloc(sizeof *r);
        *r = (Range){(uintptr_t)*address, (uintptr_t)*address + nbytes, allocated};
        allocated = r;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_host_free(void *address) {
    pthread_mutex_lock(&lock);
    int code = drop_range(&allocated, (uintptr_t)address);
    if (!code) free(address);
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_stream_create(void **handle, unsigned flags) {
    pthread_mutex_lock(&lock);
    int code = flags == 1 ? answer(F_STREAM) : INVALID_VALUE;
    if (!code) {
        Stream *s = calloc(1, sizeof *s);
        s->device = current_device;
        s->seed = (unsigned)live_streams + 1;
        s->next = streams;
        streams = s;
        live_streams++;
        pthread_create(&s->thread, NULL, run, s);
        *handle = s;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_stream_synchronize(void *handle) {
    pthread_mutex_lock(&lock);
    Stream *s = stream_of(handle);
    int code = unsafe();
    while (!code && s && s->first && !sticky) pthread_cond_wait(&changed, &lock);
    if (!code) code = s ? sticky : INVALID_HANDLE;
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_stream_destroy(void *handle) {
    pthread_mutex_lock(&lock);
    Stream *s = stream_of(handle);
    if (s) {
        s->gated = 0;
        give(s, (Op){.kind = STOP});
        live_streams--;
    }
    pthread_mutex_unlock(&lock);
    if (!s) return INVALID_HANDLE;
    pthread_join(s->thread, NULL);
    pthread_mutex_lock(&lock);
    Stream **at = &streams;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int fake_event_create(void **handle, unsigned flags) {
    pthread_mutex_lock(&lock);
    int code = flags == 2 ? answer(F_EVENT) : INVALID_VALUE;
    if (!code) {
        Event *event = calloc(1, sizeof(Event));
        event->device = current_device;
        *handle = event;
        live_events++;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_event_destroy(void *handle) {
    (void)handle;              /* kept: a late query would otherwise read freed memory instead of failing a test */
    pthread_mutex_lock(&lock);
    live_events--;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int fake_get_last_error(void) {
    pthread_mutex_lock(&lock);
    int code = sticky ? sticky : last_error;
    last_error = 0;
    pthread_mutex_unlock(&lock);
    return code;
}

int fake_is_locked(void *address) {
    pthread_mutex_lock(&lock);
    int found = range_of(registered, (uintptr_t)address) || range_of(allocated, (uintptr_t)address);
    pthread_mutex_unlock(&lock);
    return found;
}

/* ---- what tests ask for */

int fake_current_device(void) { return current_device; }

void fake_put_device(int device) { current_device = device; }

void fake_fail(int function, int code, int after_calls) {
    pthread_mutex_lock(&lock);
    codes[function] = code;
    after[function] = after_calls;
    pthread_mutex_unlock(&lock);
}

void fake_sticky(int code) {
    pthread_mutex_lock(&lock);
    sticky = code;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void fake_capture(int on) {
    pthread_mutex_lock(&lock);
    capturing = on;
    capture_broken = 0;
    pthread_mutex_unlock(&lock);
}

void fake_limit(size_t nbytes) { register_limit = nbytes; }

void fake_delay(void *handle, unsigned delay_us) {
    pthread_mutex_lock(&lock);
    for (Stream *s = streams; s; s = s->next) if (!handle || s == handle) s->delay_us = delay_us;
    pthread_mutex_unlock(&lock);
}

void fake_gate(void *handle, int closed) {
    pthread_mutex_lock(&lock);
    for (Stream *s = streams; s; s = s->next) if (!handle || s == handle) s->gated = closed;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* A kernel: on its stream, a hash of some bytes. */
int fake_sum(void *handle, const void *source, size_t nbytes, uint64_t *sum) {
    pthread_mutex_lock(&lock);
    Stream *s = stream_of(handle);
    if (s) give(s, (Op){.kind = SUM, .source = source, .nbytes = nbytes, .sum = sum});
    pthread_mutex_unlock(&lock);
    return s ? SUCCESS : INVALID_HANDLE;
}

int64_t fake_count(int what) {
    pthread_mutex_lock(&lock);
    int64_t counts[] = {live_events, live_streams, registrations, violations, copies_locked, copies_pageable, capture_broken, 0};
    for (Range *r = allocated; r; r = r->next) counts[7]++;
    pthread_mutex_unlock(&lock);
    return counts[what];
}
