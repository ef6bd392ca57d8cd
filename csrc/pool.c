/* Persistent worker threads. A call hands out items in fixed-size chunks from a shared counter; which thread takes a chunk
 * changes no result, because a kernel's items are independent. Workers spin briefly for the next call, then sleep: a pool
 * that only spins collapses when another process wants the core. */
#include "kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>
#include <xmmintrin.h>

#define MAX_WORKERS 255
#define SPINS 2000
#define MXCSR_DEFAULT 0x1f80u /* all exceptions masked, round to nearest, subnormals kept */

typedef struct {
    kernel_fn kernel;
    const void *args;
    int64_t n, grain;
} job_t;

static pthread_mutex_t call_lock = PTHREAD_MUTEX_INITIALIZER; /* one parallel call at a time */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static int workers;
static job_t job;
static atomic_ullong call; /* call number << 16 | how many workers join it: one word, so that a late riser never mixes two calls */
static atomic_int running;
static atomic_int took_part;
static atomic_llong next_item;

static void work(const job_t *j)
{
    int did = 0;
    for (;;) {
        int64_t begin = atomic_fetch_add(&next_item, j->grain);
        if (begin >= j->n)
            break;
        int64_t end = begin + j->grain < j->n ? begin + j->grain : j->n;
        j->kernel(j->args, begin, end);
        did = 1;
    }
    if (did)
        atomic_fetch_add(&took_part, 1);
}

static unsigned long long await_call(unsigned long long seen)
{
    for (int i = 0; i < SPINS; i++) {
        unsigned long long now = atomic_load(&call);
        if (now != seen)
            return now;
        _mm_pause();
    }
    pthread_mutex_lock(&lock);
    while (atomic_load(&call) == seen)
        pthread_cond_wait(&wake, &lock);
    unsigned long long now = atomic_load(&call);
    pthread_mutex_unlock(&lock);
    return now;
}

typedef struct {
    int number;
    unsigned long long seen;
} worker_start;

static worker_start starts[MAX_WORKERS];

static void *worker(void *arg)
{
    worker_start *start = arg;
    unsigned long long seen = start->seen;
    _mm_setcsr(MXCSR_DEFAULT);
    for (;;) {
        seen = await_call(seen);
        if (start->number < (int)(seen & 0xffff)) {
            work(&job);
            atomic_fetch_sub(&running, 1);
        }
    }
    return NULL;
}

/* Workers do not survive a fork and the locks keep the parent's waiters: the child starts with fresh ones. */
static void after_fork(void)
{
    call_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    workers = 0;
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork);
}

static int grow(int count)
{
    static pthread_once_t watched = PTHREAD_ONCE_INIT;
    pthread_once(&watched, watch_forks);
    if (count > MAX_WORKERS)
        count = MAX_WORKERS;
    while (workers < count) {
        pthread_t thread;
        starts[workers].number = workers;
        starts[workers].seen = atomic_load(&call);
        if (pthread_create(&thread, NULL, worker, &starts[workers]))
            break;
        pthread_detach(thread);
        workers++;
    }
    return workers < count ? workers : count;
}

static int run_parallel(const job_t *j, int threads)
{
    pthread_mutex_lock(&call_lock);
    int helpers = grow(threads - 1);
    job = *j;
    atomic_store(&next_item, 0);
    atomic_store(&took_part, 0);
    atomic_store(&running, helpers);
    pthread_mutex_lock(&lock);
    atomic_store(&call, ((atomic_load(&call) >> 16) + 1) << 16 | (unsigned)helpers);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    work(j);
    for (int spins = 0; atomic_load(&running) > 0; spins++) {
        if (spins < SPINS)
            _mm_pause();
        else
            usleep(20); /* a worker was descheduled: give its core up */
    }
    int took = atomic_load(&took_part);
    pthread_mutex_unlock(&call_lock);
    return took;
}

int fermi_run(kernel_fn kernel, const void *args, int64_t n, int64_t grain, int threads)
{
    if (n <= 0)
        return 0;
    unsigned saved = _mm_getcsr();
    _mm_setcsr(MXCSR_DEFAULT);
    int took = 1;
    if (threads <= 1 || n <= grain) {
        kernel(args, 0, n);
    } else {
        job_t j = {kernel, args, n, grain};
        took = run_parallel(&j, threads);
    }
    _mm_setcsr(saved);
    return took;
}
