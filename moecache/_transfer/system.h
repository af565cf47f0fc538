/* System calls of the engine that Cython does not declare itself, and atomic accesses. */
#ifndef MOECACHE_SYSTEM_H
#define MOECACHE_SYSTEM_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static inline void store_release(int32_t *to, int32_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
static inline int32_t load_acquire(const int32_t *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
static inline int64_t add_relaxed(int64_t *to, int64_t value) {
    return __atomic_add_fetch(to, value, __ATOMIC_RELAXED);
}
static inline int64_t load_relaxed(const int64_t *from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
static inline void store_double(double *to, double value) { __atomic_store(to, &value, __ATOMIC_RELAXED); }
static inline double load_double(const double *from) {
    double value;
    __atomic_load(from, &value, __ATOMIC_RELAXED);
    return value;
}

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    int error = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return error;
}

static inline void cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t deadline_ns) {
    struct timespec t = {deadline_ns / 1000000000, deadline_ns % 1000000000};
    pthread_cond_timedwait(cond, mutex, &t);
}

/* The default timer slack of 50 us would make every poll of a copy that late. Signals are for Python's threads. */
static inline void prepare_thread(void) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    prctl(PR_SET_NAME, "moecache-io", 0UL, 0UL, 0UL);
}

static inline void advise_huge(void *memory, size_t nbytes) {
#ifdef MADV_HUGEPAGE
    int kept = errno;
    madvise(memory, nbytes, MADV_HUGEPAGE);
    errno = kept;
#endif
}

/* Alignment that direct reads of this file need, of offset and length; 0: the file system says it has none.
   Of the memory they may need less, and never more. */
static inline int64_t direct_alignment(int fd, int64_t *memory) {
    *memory = 4096;
#ifdef STATX_DIOALIGN
    struct statx s;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &s) == 0 && (s.stx_mask & STATX_DIOALIGN)) {
        *memory = s.stx_dio_mem_align;
        return s.stx_dio_mem_align > s.stx_dio_offset_align ? s.stx_dio_mem_align : s.stx_dio_offset_align;
    }
#endif
    return 4096;
}

/* What distinguishes a file from another one, and from itself after a write. Returns an errno. */
static inline int stamp_of(int fd, uint64_t *inode, int64_t *nbytes, int64_t *modified_ns) {
    struct stat s;
    if (fstat(fd, &s)) return errno;
    *inode = s.st_ino;
    *nbytes = s.st_size;
    *modified_ns = (int64_t)s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec;
    return 0;
}

static int32_t forks = 0;  /* threads do not survive a fork: an engine made before one is dead after it */
static void count_fork(void) { forks++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }
static int32_t fork_count(void) { return forks; }
#endif
