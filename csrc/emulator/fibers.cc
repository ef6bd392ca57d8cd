/* The threads of a block: one fiber each, one at a time between two barriers, in an order that the seed shuffles, so that nothing
 * can lean on a warp's lockstep. x86-64 only. */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

fermi_position fermi_here;

namespace {

enum state { READY, AT_BARRIER, AT_BALLOT, DONE };

struct fiber {
    void *stack_pointer;
    state at;
    int line;
    int predicate;
    unsigned result; /* of the last barrier or ballot */
    void *asan_stack;
};

constexpr uint64_t PAGE = 4096;
constexpr unsigned WARP = 32;

fiber fibers[MAX_THREADS];
void *scheduler_stack_pointer;

/* Saves the callee-saved registers on the stack, leaves its pointer in *save and goes on where `to` was left. */
extern "C" void fermi_switch(void **save, void *to);
asm(".text\n"
    ".hidden fermi_switch\n"
    ".globl fermi_switch\n"
    ".type fermi_switch, @function\n"
    "fermi_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
    "ret\n"
    ".size fermi_switch, .-fermi_switch\n"
    ".section .note.GNU-stack, \"\", @progbits\n"
    ".text\n");

#ifdef __SANITIZE_ADDRESS__
void *scheduler_asan_stack;
const void *scheduler_bottom;
size_t scheduler_bytes;
#define LEAVING(save, bottom, bytes) __sanitizer_start_switch_fiber(save, bottom, bytes)
#define ARRIVED(save, bottom, bytes) __sanitizer_finish_switch_fiber(save, bottom, bytes)
#else
#define LEAVING(save, bottom, bytes) (void)0
#define ARRIVED(save, bottom, bytes) (void)0
#endif

char *stack_of(unsigned i)
{
    return fermi_run.stacks + i * (STACK_BYTES + PAGE) + PAGE;
}

void to_scheduler()
{
    fiber *me = &fibers[fermi_run.thread];
    LEAVING(me->at == DONE ? nullptr : &me->asan_stack, scheduler_bottom, scheduler_bytes);
    fermi_switch(&me->stack_pointer, scheduler_stack_pointer);
    ARRIVED(me->asan_stack, &scheduler_bottom, &scheduler_bytes);
}

void thread_main()
{
    ARRIVED(nullptr, &scheduler_bottom, &scheduler_bytes);
    fermi_run.kernel(fermi_run.request->args);
    fibers[fermi_run.thread].at = DONE;
    to_scheduler();
    abort();
}

void start(unsigned i)
{
    /* Tops of stacks at different offsets, so that they do not all fall into the same cache lines. */
    void **top = (void **)(stack_of(i) + STACK_BYTES - 64 - (i % 16) * 128);
    *--top = nullptr; /* thread_main's return address: never used, and it aligns the stack */
    *--top = (void *)thread_main;
    for (int r = 0; r < 6; r++)
        *--top = nullptr;
    fibers[i].stack_pointer = top;
    fibers[i].at = READY;
    fibers[i].line = 0;
}

void resume(unsigned i)
{
    unsigned x = fermi_here.threads.x, y = fermi_here.threads.y;
    fermi_here.thread = {i % x, i / x % y, i / (x * y)};
    fermi_run.thread = i;
    LEAVING(&scheduler_asan_stack, stack_of(i), STACK_BYTES);
    fermi_switch(&scheduler_stack_pointer, fibers[i].stack_pointer);
    ARRIVED(scheduler_asan_stack, nullptr, nullptr);
}

const char *place(unsigned i, char *text, size_t bytes)
{
    static const char *const what[] = {"runs", "waits at __syncthreads", "waits at warp_ballot", "has left the kernel"};
    if (fibers[i].at == DONE)
        snprintf(text, bytes, "thread %u %s", i, what[DONE]);
    else
        snprintf(text, bytes, "thread %u %s in line %d", i, what[fibers[i].at], fibers[i].line);
    return text;
}

void diverged(const char *what, unsigned i, unsigned j)
{
    char a[96], b[96];
    fermi_note_failure("%s: %s, %s", what, place(i, a, sizeof a), place(j, b, sizeof b));
}

/* Answers the ballots of warps whose threads all wait at one; false after a divergence. */
bool answer_ballots(unsigned n)
{
    for (unsigned first = 0; first < n; first += WARP) {
        unsigned end = first + WARP < n ? first + WARP : n, mask = 0, one = n;
        for (unsigned i = first; i < end; i++)
            if (fibers[i].at == AT_BALLOT) {
                one = i;
                mask |= (unsigned)fibers[i].predicate << (i - first);
            }
        if (one == n)
            continue;
        for (unsigned i = first; i < end; i++)
            if (fibers[i].at != DONE && (fibers[i].at != AT_BALLOT || fibers[i].line != fibers[one].line)) {
                diverged("warp_ballot in diverged code", one, i);
                return false;
            }
        for (unsigned i = first; i < end; i++)
            if (fibers[i].at == AT_BALLOT) {
                fibers[i].at = READY;
                fibers[i].result = mask;
            }
    }
    return true;
}

/* Opens the barrier at which every thread waits; false when all have left, or after a divergence. */
bool open_barrier(unsigned n)
{
    unsigned waiting = n, left = n, count = 0;
    for (unsigned i = 0; i < n; i++) {
        if (fibers[i].at == DONE) {
            left = i;
            continue;
        }
        if (waiting != n && fibers[i].line != fibers[waiting].line) {
            diverged("__syncthreads in diverged code", waiting, i);
            return false;
        }
        waiting = i;
        count += (unsigned)fibers[i].predicate;
    }
    if (waiting == n)
        return false;
    if (left != n) {
        diverged("__syncthreads in diverged code", waiting, left);
        return false;
    }
    for (unsigned i = 0; i < n; i++) {
        fibers[i].at = READY;
        fibers[i].result = count;
    }
    fermi_watch_barrier();
    return true;
}

/* Every thread up to the next barrier, or its end; ballots on the way. */
bool run_interval(unsigned n)
{
    unsigned order[MAX_THREADS];
    for (;;) {
        unsigned ready = 0, ballots = 0;
        for (unsigned i = 0; i < n; i++)
            if (fibers[i].at == READY)
                order[ready++] = i;
        fermi_shuffle(order, ready);
        for (unsigned i = 0; i < ready; i++) {
            resume(order[i]);
            if (fermi_run.failed)
                return false;
            ballots += fibers[order[i]].at == AT_BALLOT;
        }
        if (!ballots)
            return true;
        if (!answer_ballots(n))
            return false;
    }
}

} // namespace

bool fermi_allocate_stacks()
{
    if (fermi_run.stacks)
        return true;
    uint64_t bytes = MAX_THREADS * (STACK_BYTES + PAGE);
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return false;
    fermi_run.stacks = (char *)p;
    fermi_run.stacks_bytes = bytes;
    return true;
}

/* A page without access below each stack in use. Only those in use: each costs two mappings, a process may have 65,530, and
 * every op is a library of its own. */
static void guard_stacks(unsigned n)
{
    static unsigned guarded;
    for (; guarded < n; guarded++)
        mprotect(stack_of(guarded) - PAGE, PAGE, PROT_NONE);
}

void fermi_run_threads(unsigned n)
{
    guard_stacks(n);
    for (unsigned i = 0; i < n; i++)
        start(i);
    while (run_interval(n) && open_barrier(n))
        ;
}

void fermi_fail(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fermi_set_failure(format, values);
    va_end(values);
    to_scheduler();
    abort();
}

int fermi_barrier(int line, int predicate)
{
    fiber *me = &fibers[fermi_run.thread];
    me->at = AT_BARRIER;
    me->line = line;
    me->predicate = predicate;
    to_scheduler();
    return (int)me->result;
}

unsigned fermi_ballot(int line, int predicate)
{
    fiber *me = &fibers[fermi_run.thread];
    me->at = AT_BALLOT;
    me->line = line;
    me->predicate = predicate;
    to_scheduler();
    return me->result;
}

unsigned fermi_atomic_add(unsigned *p, unsigned v)
{
    fermi_watch_atomic(p, sizeof *p, __builtin_return_address(0));
    unsigned old = *p;
    *p = old + v;
    return old;
}
