/* Persistent worker threads that run a list of steps. A step's items are cut into chunks of fixed size, and a thread takes
 * a run of chunks at a time: long runs first, because memory is read best in one piece, single chunks in the end, so that all
 * finish together. Who takes what changes no result, because a kernel's items are independent.
 *
 * A step is over when all its chunks are done, not when all threads have arrived: a thread that the system has put aside
 * holds the others up only while it holds chunks. So there is no barrier. One word tells which step is open and how many of
 * its chunks are left; taking some is a compare-and-swap on it, which fails for whoever comes late, be it by a step or by a
 * whole call. Whoever finishes the last chunk of a step opens the next. A thread without a chunk spins briefly, then sleeps:
 * spinning threads would hold the core that the owner of the last chunk may be waiting for. */
#define _GNU_SOURCE
#include "kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <x86intrin.h>

#define MAX_WORKERS 255
#define SPIN_CYCLES 100000u   /* 30 to 50 us at 2 to 3 GHz: longer than a step's usual tail, shorter than a time slice */
#define MXCSR_DEFAULT 0x1f80u /* all exceptions masked, round to nearest, subnormals kept */
#define LEFT_BITS 24
#define LEFT_MASK ((1ull << LEFT_BITS) - 1)
#define LINE __attribute__((aligned(64)))

/* What all threads of a call share. Fields change only while no chunk is out. */
static struct {
    LINE atomic_ullong open; /* number of the step << 24 | chunks nobody has taken yet; numbers are never used twice */
    LINE atomic_llong done;  /* chunks of the open step that are finished */
    LINE atomic_int sleepers;
    atomic_ullong joined; /* threads that took a chunk in this call, a bit each (63 and up share one) */
    const fermi_step *steps;
    int64_t count;
    unsigned long long first; /* number of steps[0] */
    int64_t chunks;           /* of the open step */
    int64_t *elapsed_ns, opened_ns;
    LINE atomic_int limit;    /* workers 1..limit take part */
} call;

static pthread_mutex_t call_lock = PTHREAD_MUTEX_INITIALIZER; /* one parallel call at a time */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t step_opened = PTHREAD_COND_INITIALIZER;
static pthread_cond_t limit_raised = PTHREAD_COND_INITIALIZER;
static int workers;
static pthread_t handles[MAX_WORKERS + 1];
static int pinned[MAX_WORKERS + 1], pins, placed; /* CPU of thread i < pins; whether fermi_pin was ever called */
static cpu_set_t unpinned;                        /* where all others may run then */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int64_t grain_of(const fermi_step *s)
{
    int64_t least = s->n / (int64_t)LEFT_MASK + 1;
    return s->grain > least ? s->grain : least;
}

static int64_t chunks_of(const fermi_step *s)
{
    int64_t grain = grain_of(s);
    return s->n <= 0 ? 0 : (s->n + grain - 1) / grain;
}

/* Adds the time since the last call to the step that ended (none where index is 0). */
static void clock_step(int64_t index)
{
    if (!call.elapsed_ns)
        return;
    int64_t now = now_ns();
    if (index > 0)
        call.elapsed_ns[index - 1] += now - call.opened_ns;
    call.opened_ns = now;
}

/* Opens the step of this number, or the first after it that has items; past the last one no chunk is ever left. */
static void open_step(unsigned long long number)
{
    int64_t index = (int64_t)(number - call.first);
    clock_step(index);
    while (index < call.count && chunks_of(&call.steps[index]) == 0)
        index++;
    int64_t chunks = call.chunks = index < call.count ? chunks_of(&call.steps[index]) : 0;
    atomic_store(&call.done, 0);
    atomic_store(&call.open, (call.first + (unsigned long long)index) << LEFT_BITS | (unsigned long long)chunks);
    if (chunks != 1 && atomic_load(&call.sleepers)) { /* one chunk is for this thread; none is news for the caller */
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&step_opened);
        pthread_mutex_unlock(&sleep_lock);
    }
}

/* How many of the chunks left a thread takes at once: half of an even share. */
static int64_t run_of(int64_t left, int threads)
{
    int64_t run = left / (2 * threads);
    return run > 1 ? run : 1;
}

/* Takes and runs chunks while there are any. */
static void work(int self)
{
    int threads = atomic_load(&call.limit) + 1;
    for (;;) {
        unsigned long long word = atomic_load(&call.open);
        int64_t left = (int64_t)(word & LEFT_MASK), run = run_of(left, threads);
        if (!left || self > atomic_load(&call.limit)) /* the limit was set before this step was opened */
            return;
        if (!atomic_compare_exchange_weak(&call.open, &word, word - (unsigned long long)run))
            continue;
        /* From here to the addition to `done` the step cannot end, so everything about it stands still. */
        int64_t chunks = call.chunks;
        const fermi_step *s = &call.steps[(word >> LEFT_BITS) - call.first];
        int64_t grain = grain_of(s), begin = (chunks - left) * grain, end = begin + run * grain;
        s->kernel(s->args, begin, end < s->n ? end : s->n);
        atomic_fetch_or_explicit(&call.joined, 1ull << (self < 63 ? self : 63), memory_order_relaxed);
        if (atomic_fetch_add(&call.done, run) + run == chunks)
            open_step((word >> LEFT_BITS) + 1);
    }
}

/* Returns some time after the word stopped being `seen`. */
static void await_change(unsigned long long seen)
{
    for (unsigned long long begin = __rdtsc(); __rdtsc() - begin < SPIN_CYCLES;) {
        if (atomic_load(&call.open) != seen)
            return;
        _mm_pause();
    }
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&call.sleepers, 1);
    while (atomic_load(&call.open) == seen)
        pthread_cond_wait(&step_opened, &sleep_lock);
    atomic_fetch_sub(&call.sleepers, 1);
    pthread_mutex_unlock(&sleep_lock);
}

static void await_turn(int self)
{
    pthread_mutex_lock(&sleep_lock);
    while (self > atomic_load(&call.limit))
        pthread_cond_wait(&limit_raised, &sleep_lock);
    pthread_mutex_unlock(&sleep_lock);
}

static int place(int self)
{
    cpu_set_t set = unpinned;
    if (self < pins) {
        CPU_ZERO(&set);
        CPU_SET(pinned[self], &set);
    }
    return placed ? pthread_setaffinity_np(handles[self], sizeof set, &set) : 0;
}

/* Worker number `self` is thread `self` of a call, 1 and up. */
static void *worker(void *arg)
{
    int self = (int)(intptr_t)arg;
    _mm_setcsr(MXCSR_DEFAULT);
    for (;;) {
        await_turn(self);
        work(self);
        unsigned long long word = atomic_load(&call.open);
        if (!(word & LEFT_MASK))
            await_change(word);
    }
    return NULL;
}

/* Workers do not survive a fork and the locks keep the parent's waiters: the child starts with fresh ones. */
static void after_fork(void)
{
    call_lock = sleep_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    step_opened = limit_raised = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    atomic_store(&call.sleepers, 0);
    atomic_store(&call.limit, 0);
    atomic_store(&call.open, atomic_load(&call.open) & ~LEFT_MASK);
    workers = 0;
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork);
}

/* Lets workers 1..count take part, starting those that are missing; fewer where the system refuses. */
static void set_limit(int count)
{
    static pthread_once_t watched = PTHREAD_ONCE_INIT;
    pthread_once(&watched, watch_forks);
    while (workers < count && workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(workers + 1)))
            break;
        pthread_detach(thread);
        handles[++workers] = thread;
        place(workers); /* fermi_pin has told whether it can */
    }
    pthread_mutex_lock(&sleep_lock);
    if (count > atomic_load(&call.limit))
        pthread_cond_broadcast(&limit_raised);
    atomic_store(&call.limit, count);
    pthread_mutex_unlock(&sleep_lock);
}

static int run_parallel(const fermi_step *steps, int64_t count, int threads, int64_t *elapsed_ns)
{
    pthread_mutex_lock(&call_lock);
    if (threads - 1 != atomic_load(&call.limit))
        set_limit(threads - 1);
    call.steps = steps;
    call.count = count;
    call.first = (atomic_load(&call.open) >> LEFT_BITS) + 1;
    call.elapsed_ns = elapsed_ns;
    atomic_store(&call.joined, 0);
    open_step(call.first);
    for (;;) {
        work(0);
        unsigned long long word = atomic_load(&call.open);
        if (word == (call.first + (unsigned long long)count) << LEFT_BITS)
            break;
        if (!(word & LEFT_MASK))
            await_change(word);
    }
    int took = __builtin_popcountll(atomic_load(&call.joined));
    pthread_mutex_unlock(&call_lock);
    return took;
}

static int run_alone(const fermi_step *steps, int64_t count, int64_t *elapsed_ns)
{
    int64_t opened = elapsed_ns ? now_ns() : 0;
    for (int64_t i = 0; i < count; i++) {
        if (steps[i].n > 0)
            steps[i].kernel(steps[i].args, 0, steps[i].n);
        if (elapsed_ns) {
            int64_t now = now_ns();
            elapsed_ns[i] += now - opened;
            opened = now;
        }
    }
    return 1;
}

int fermi_run_steps(const fermi_step *steps, int64_t count, int threads, int64_t *elapsed_ns)
{
    unsigned saved = _mm_getcsr();
    _mm_setcsr(MXCSR_DEFAULT);
    int took = threads > 1 ? run_parallel(steps, count, threads, elapsed_ns) : run_alone(steps, count, elapsed_ns);
    _mm_setcsr(saved);
    return took;
}

int fermi_run(kernel_fn kernel, const void *args, int64_t n, int64_t grain, int threads)
{
    fermi_step step = {kernel, args, n, grain};
    return n <= 0 ? 0 : fermi_run_steps(&step, 1, n <= grain ? 1 : threads, NULL);
}

int fermi_pin(const int *cpus, int count)
{
    pthread_mutex_lock(&call_lock);
    pins = count < MAX_WORKERS + 1 ? count : MAX_WORKERS + 1;
    for (int i = 0; i < pins; i++)
        pinned[i] = cpus[i];
    int error = pthread_getaffinity_np(pthread_self(), sizeof unpinned, &unpinned);
    placed = !error;
    for (int i = 1; i <= workers; i++) {
        int refused = place(i);
        error = error ? error : refused;
    }
    pthread_mutex_unlock(&call_lock);
    return error;
}
