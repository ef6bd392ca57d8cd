/* Runs a kernel on the CPU under the rules of an sm_20 card: blocks one after another in an order that the seed shuffles, shared
 * memory poisoned before each, faults of the kernel turned into a message. */
#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

fermi_state fermi_run;

namespace {

constexpr uint64_t MAX_BLOCKS = 1u << 28; /* a day's work */
constexpr uint64_t OVERRUN = 256; /* behind dynamic shared memory: looked at after each block */

char *dynamic_memory; /* MAX_SHARED + OVERRUN */
char failure[512];
sigjmp_buf at_fault;
uint64_t random_state;

#ifdef __SANITIZE_ADDRESS__
#define GUARD_BEHIND(p, bytes) __asan_poison_memory_region(p, bytes)
#define UNGUARD(p, bytes) __asan_unpoison_memory_region(p, bytes)
#else
#define GUARD_BEHIND(p, bytes) (void)0
#define UNGUARD(p, bytes) (void)0
#endif

uint64_t random_next()
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

void poison(char *p, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        p[i] = (char)(SHARED_POISON >> (i % 4 * 8));
}

bool is_poison(const char *p, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        if (p[i] != (char)(SHARED_POISON >> (i % 4 * 8)))
            return false;
    return true;
}

void run_block(unsigned n)
{
    const fermi_request *r = fermi_run.request;
    for (int64_t i = 0; i < r->variable_count; i++)
        poison(fermi_shared_begin + r->variables[i].offset, r->variables[i].size);
    char *behind = fermi_run.dynamic_begin + r->dynamic_shared;
    poison(fermi_run.dynamic_begin, r->dynamic_shared + OVERRUN);
    GUARD_BEHIND(behind, OVERRUN);
    fermi_watch_block();
    fermi_run_threads(n);
    UNGUARD(behind, OVERRUN);
    if (!fermi_run.failed && !is_poison(behind, OVERRUN))
        fermi_note_failure("wrote behind its %llu bytes of dynamic shared memory", (unsigned long long)r->dynamic_shared);
}

void run_grid(unsigned threads)
{
    const uint32_t *g = fermi_run.request->grid;
    uint64_t blocks = (uint64_t)g[0] * g[1] * g[2];
    unsigned *order = (unsigned *)malloc(blocks * sizeof *order);
    for (uint64_t i = 0; i < blocks; i++)
        order[i] = (unsigned)i;
    fermi_shuffle(order, (unsigned)blocks);
    for (uint64_t i = 0; i < blocks && !fermi_run.failed; i++) {
        unsigned b = order[i];
        fermi_here.block = {b % g[0], b / g[0] % g[1], b / (g[0] * g[1])};
        run_block(threads);
    }
    free(order);
}

void on_fault(int, siginfo_t *info, void *)
{
    const fermi_index t = fermi_here.thread;
    fermi_note_failure("thread (%u, %u, %u): memory fault or division by zero at address %p", t.x, t.y, t.z, info->si_addr);
    siglongjmp(at_fault, 1);
}

/* Runs the grid with faults of the kernel turned into a failure. */
void run_guarded(unsigned threads)
{
#ifdef __SANITIZE_ADDRESS__
    run_grid(threads);
#else
    static char signal_stack[64 * 1024];
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE};
    stack_t stack = {}, old_stack;
    struct sigaction action = {}, old[3];
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &old_stack);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; i++)
        sigaction(signals[i], &action, &old[i]);
    if (sigsetjmp(at_fault, 1) == 0)
        run_grid(threads);
    for (int i = 0; i < 3; i++)
        sigaction(signals[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
#endif
}

bool allocate()
{
    if (!dynamic_memory)
        dynamic_memory = (char *)aligned_alloc(OVERRUN, MAX_SHARED + OVERRUN);
    return dynamic_memory && fermi_allocate_stacks();
}

/* What would overrun the runtime itself; the card's limits are checked, with names, before a launch gets here. */
bool fits(const fermi_request *r, const fermi_entry *entry)
{
    uint64_t section = (uint64_t)(fermi_shared_end - fermi_shared_begin);
    for (int64_t i = 0; i < r->variable_count; i++)
        if (r->variables[i].offset + r->variables[i].size > section)
            return false;
    return (uint64_t)r->block[0] * r->block[1] * r->block[2] <= MAX_THREADS && r->dynamic_shared <= MAX_SHARED &&
           entry->args_bytes == r->args_bytes;
}

const fermi_entry *find(const char *name)
{
    for (const fermi_entry *e = fermi_entries; e->name; e++)
        if (!strcmp(e->name, name))
            return e;
    return nullptr;
}

} // namespace

void fermi_shuffle(unsigned *order, unsigned n)
{
    if (fermi_run.request->seed == 0)
        return;
    for (unsigned i = n; i > 1; i--) {
        unsigned j = (unsigned)(((random_next() >> 32) * i) >> 32), t = order[i - 1];
        order[i - 1] = order[j];
        order[j] = t;
    }
}

void fermi_set_failure(const char *format, va_list values)
{
    const fermi_index b = fermi_here.block;
    int n = snprintf(failure, sizeof failure, "block (%u, %u, %u): ", b.x, b.y, b.z);
    vsnprintf(failure + n, sizeof failure - (size_t)n, format, values);
    fermi_run.failed = true;
}

void fermi_note_failure(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fermi_set_failure(format, values);
    va_end(values);
}

extern "C" __attribute__((visibility("default"))) int fermi_launch(fermi_request *request, char *message, int64_t bytes)
{
    const fermi_entry *entry = find(request->entry);
    const uint32_t *g = request->grid;
    const char *refusal = !entry                                  ? "no such entry point"
                          : !fits(request, entry)                 ? "the launch does not fit its kernel"
                          : (uint64_t)g[0] * g[1] * g[2] > MAX_BLOCKS ? "more blocks than the emulator runs"
                          : !allocate()                           ? "no memory for the threads"
                                                                  : nullptr;
    if (refusal) {
        snprintf(message, (size_t)bytes, "%s", refusal);
        return 1;
    }
    fermi_run.request = request;
    fermi_run.dynamic_begin = dynamic_memory;
    fermi_here = {};
    fermi_here.threads = {request->block[0], request->block[1], request->block[2]};
    fermi_here.blocks = {request->grid[0], request->grid[1], request->grid[2]};
    fermi_here.dynamic_shared = fermi_run.dynamic_begin;
    fermi_run.kernel = entry->call;
    random_state = request->seed ? request->seed * 0x9e3779b97f4a7c15ull | 1 : 1;
    fermi_run.failed = false;
    fermi_watch_launch();
    run_guarded(request->block[0] * request->block[1] * request->block[2]);
    fermi_watch_end();
    if (fermi_run.failed)
        snprintf(message, (size_t)bytes, "%s", failure);
    return fermi_run.failed;
}

extern "C" __attribute__((visibility("default"))) int fermi_intact(const uint64_t *areas, int64_t count, int64_t bytes,
                                                                    uint32_t pattern, int64_t *which)
{
    for (int64_t i = 0; i < count; i++)
        for (uint64_t p = areas[i], end = p + (uint64_t)bytes; p < end;) {
            bool word = p % 4 == 0 && p + 4 <= end;
            bool same = word ? *(const uint32_t *)p == pattern : *(const uint8_t *)p == (uint8_t)(pattern >> (p % 4 * 8));
            if (!same) {
                *which = i;
                return 0;
            }
            p += word ? 4 : 1;
        }
    return 1;
}
