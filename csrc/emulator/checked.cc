/* The checked build: who touches which byte, and whether it may. The kernels are compiled with -fsanitize=thread, which calls
 * __tsan_read4 and the like before each memory access, and with some checks of -fsanitize=undefined; this file stands in for
 * both runtimes, so that the rules are CUDA's and not those of CPU threads, exactly and whatever the order of execution:
 *  - within a block, two threads touch a byte of shared or device memory between the same two barriers, one of them writing;
 *  - two blocks of a launch touch a byte of device memory, one of them writing;
 *  - a byte lies in no live buffer and in no shared variable of the kernel;
 *  - an index lies outside its array, a pointer is not aligned to its type, a shift or a division is undefined.
 * Atomics race with plain accesses only. */
#include "runtime.h"

#ifndef FERMI_CHECKED

void fermi_watch_launch() {}
void fermi_watch_block() {}
void fermi_watch_barrier() {}
void fermi_watch_atomic(const void *, uint64_t, const void *) {}
void fermi_watch_end() {}

#else

#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

namespace {

constexpr uint32_t MANY = 0xffffffffu;   /* more than one reader */
constexpr uint32_t ATOMIC = 0xfffffffeu; /* written by atomics */

/* The last accesses to a byte. Epochs number the barrier intervals of all blocks of all launches. */
struct record {
    uint32_t write_epoch, writer, write_pc;
    uint32_t read_epoch, reader, read_pc;
};

enum access { READ, WRITE, UPDATE };

struct area {
    uintptr_t base, size;
    record *records;
    const char *name;
    bool live;
};

uint32_t launch_epoch, block_epoch, now;
record *static_records, *dynamic_records;
uint64_t static_bytes;
uintptr_t image_base, image_end;
fermi_range *last_range;

record *new_records(uint64_t bytes)
{
    void *p = mmap(nullptr, bytes * sizeof(record), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (record *)p;
}

int find_image(struct dl_phdr_info *info, size_t, void *)
{
    uintptr_t self = (uintptr_t)&find_image, low = UINTPTR_MAX, high = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto &segment = info->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD)
            continue;
        uintptr_t begin = info->dlpi_addr + segment.p_vaddr, end = begin + segment.p_memsz;
        low = begin < low ? begin : low;
        high = end > high ? end : high;
    }
    if (self < low || self >= high)
        return 0;
    image_base = low;
    image_end = high;
    return 1;
}

unsigned where(const void *pc)
{
    return (unsigned)((uintptr_t)pc - image_base - 1); /* - 1: into the call, not behind it */
}

/* The kernel's shared variable that holds the byte, or null. */
const fermi_shared_variable *variable_at(uint64_t offset)
{
    const fermi_request *r = fermi_run.request;
    for (int64_t i = 0; i < r->variable_count; i++)
        if (offset >= r->variables[i].offset && offset < r->variables[i].offset + r->variables[i].size)
            return &r->variables[i];
    return nullptr;
}

fermi_range *range_at(uintptr_t p)
{
    if (last_range && p - last_range->base < last_range->size)
        return last_range;
    fermi_range *ranges = fermi_run.request->ranges;
    int64_t low = 0, high = fermi_run.request->range_count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (ranges[middle].base + ranges[middle].size <= p)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == fermi_run.request->range_count || p < ranges[low].base)
        return nullptr;
    return last_range = &ranges[low];
}

/* What the byte belongs to; false for the thread's own stack and constants, which need no watching. */
bool find_area(uintptr_t p, area *found)
{
    uintptr_t offset = p - (uintptr_t)fermi_shared_begin;
    if (offset < static_bytes) {
        const fermi_shared_variable *v = variable_at(offset);
        *found = {v ? (uintptr_t)fermi_shared_begin + v->offset : p, v ? v->size : 0,
                  v ? static_records + v->offset : nullptr, v ? v->name : nullptr, v != nullptr};
        return true;
    }
    uintptr_t dynamic = (uintptr_t)fermi_run.dynamic_begin;
    if (p - dynamic < MAX_SHARED) {
        uint64_t bytes = fermi_run.request->dynamic_shared;
        *found = {dynamic, bytes, dynamic_records, "dynamic shared memory", true};
        return true;
    }
    if (p - (uintptr_t)fermi_run.stacks < fermi_run.stacks_bytes || (p >= image_base && p < image_end))
        return false;
    fermi_range *r = range_at(p);
    if (!r) {
        *found = {p, 0, nullptr, nullptr, false};
        return true;
    }
    if (!r->shadow)
        r->shadow = new_records(r->size);
    *found = {r->base, r->size, (record *)r->shadow, r->name, r->live != 0};
    return true;
}

const char *const VERB[] = {"reads", "writes", "updates"};

[[noreturn]] void outside(uintptr_t p, uint64_t bytes, access kind, const area &a, unsigned pc)
{
    const fermi_index t = fermi_here.thread;
    if (a.size && !a.live)
        fermi_fail("thread (%u, %u, %u) %s %llu bytes of buffer '%s' after it was freed {pc 0x%x}", t.x, t.y, t.z, VERB[kind],
                   (unsigned long long)bytes, a.name, pc);
    if (a.size || a.name)
        fermi_fail("thread (%u, %u, %u) %s %llu bytes at byte %lld of '%s', which has %llu {pc 0x%x}", t.x, t.y, t.z,
                   VERB[kind], (unsigned long long)bytes, (long long)(p - a.base), a.name, (unsigned long long)a.size, pc);
    const fermi_range *before = nullptr;
    const fermi_request *r = fermi_run.request;
    for (int64_t i = 0; i < r->range_count; i++)
        if (r->ranges[i].base <= p)
            before = &r->ranges[i];
    char place[96] = "before the first";
    if (before)
        snprintf(place, sizeof place, "%llu bytes behind '%s'", (unsigned long long)(p - before->base - before->size),
                 before->name);
    fermi_fail("thread (%u, %u, %u) %s %llu bytes outside every buffer, %s {pc 0x%x}", t.x, t.y, t.z, VERB[kind],
               (unsigned long long)bytes, place, pc);
}

[[noreturn]] void race(const area &a, uintptr_t p, access kind, unsigned pc, bool other_block, uint32_t other, unsigned other_pc,
                       const char *did)
{
    const fermi_index t = fermi_here.thread;
    char who[64] = "other threads";
    if (other_block)
        snprintf(who, sizeof who, "another block");
    else if (other < MAX_THREADS)
        snprintf(who, sizeof who, "thread %u", other);
    fermi_fail("race on byte %llu of '%s': thread (%u, %u, %u) %s {pc 0x%x} what %s %s {pc 0x%x} %s",
               (unsigned long long)(p - a.base), a.name, t.x, t.y, t.z, VERB[kind], pc, who, did, other_pc,
               other_block ? "in the same launch" : "with no barrier between");
}

/* Whether an access of `epoch` conflicts by time alone: by another block of this launch, or in this barrier interval. */
bool other_block(uint32_t epoch)
{
    return epoch >= launch_epoch && epoch < block_epoch;
}

void look(record *r, const area &a, uintptr_t p, access kind, unsigned pc)
{
    uint32_t me = fermi_run.thread, as = kind == UPDATE ? ATOMIC : me;
    bool foreign = other_block(r->write_epoch), shares = r->writer == as || (kind == UPDATE && r->writer == me);
    if ((foreign && !(kind == UPDATE && r->writer == ATOMIC)) || (r->write_epoch == now && !shares))
        race(a, p, kind, pc, foreign, r->writer, r->write_pc, "wrote");
    if (kind != READ) {
        foreign = other_block(r->read_epoch);
        if (foreign || (r->read_epoch == now && r->reader != me))
            race(a, p, kind, pc, foreign, r->reader, r->read_pc, "read");
        r->write_epoch = now;
        r->writer = as;
        r->write_pc = pc;
    } else if (!other_block(r->read_epoch)) { /* a foreign reader is kept: any write after it is a race */
        r->reader = r->read_epoch == now && r->reader != me ? MANY : me;
        r->read_epoch = now;
        r->read_pc = pc;
    }
}

void touch(const void *address, uint64_t bytes, access kind, const void *return_address)
{
    uintptr_t p = (uintptr_t)address;
    area a;
    if (!find_area(p, &a))
        return;
    unsigned pc = where(return_address);
    if (!a.live || p - a.base + bytes > a.size)
        outside(p, bytes, kind, a, pc);
    if (!a.records)
        fermi_fail("the emulator found no memory for its records");
    for (uint64_t i = 0; i < bytes; i++)
        look(a.records + (p - a.base) + i, a, p + i, kind, pc);
}

} // namespace

void fermi_watch_launch()
{
    if (!image_end) {
        dl_iterate_phdr(find_image, nullptr);
        static_bytes = (uint64_t)(fermi_shared_end - fermi_shared_begin);
        static_records = new_records(static_bytes + 1);
        dynamic_records = new_records(MAX_SHARED);
    }
    now = launch_epoch = (uint32_t)fermi_run.request->epoch + 1;
    last_range = nullptr;
}

void fermi_watch_block()
{
    block_epoch = ++now;
    /* Shared memory is the block's own: what other blocks did to these bytes was to other memory. */
    memset(static_records, 0, static_bytes * sizeof(record));
    memset(dynamic_records, 0, fermi_run.request->dynamic_shared * sizeof(record));
}

void fermi_watch_barrier()
{
    now++;
}

void fermi_watch_atomic(const void *p, uint64_t bytes, const void *pc)
{
    touch(p, bytes, UPDATE, pc);
}

void fermi_watch_end()
{
    fermi_run.request->epoch = now;
    for (int64_t i = 0; i < fermi_run.request->range_count; i++) {
        fermi_range *r = &fermi_run.request->ranges[i];
        if (r->shadow)
            munmap(r->shadow, r->size * sizeof(record));
        r->shadow = nullptr;
    }
}

#define HOOK(name, bytes, kind)                                                                                         \
    void name(void *p)                                                                                                  \
    {                                                                                                                   \
        touch(p, bytes, kind, __builtin_return_address(0));                                                             \
    }
#define HOOKS(bytes)                                                                                                    \
    HOOK(__tsan_read##bytes, bytes, READ)                                                                               \
    HOOK(__tsan_write##bytes, bytes, WRITE)                                                                             \
    HOOK(__tsan_unaligned_read##bytes, bytes, READ)                                                                     \
    HOOK(__tsan_unaligned_write##bytes, bytes, WRITE)

struct undefined_place {
    const char *file;
    unsigned line, column;
};

static void undefined(const void *data, const char *what)
{
    const undefined_place *place = (const undefined_place *)data; /* every record of -fsanitize=undefined begins so */
    const char *slash = strrchr(place->file, '/');
    const fermi_index t = fermi_here.thread;
    fermi_fail("thread (%u, %u, %u): %s (%s:%u)", t.x, t.y, t.z, what, slash ? slash + 1 : place->file, place->line);
}

#pragma GCC visibility push(hidden)
extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_read_range(void *p, unsigned long bytes)
{
    touch(p, bytes, READ, __builtin_return_address(0));
}

void __tsan_write_range(void *p, unsigned long bytes)
{
    touch(p, bytes, WRITE, __builtin_return_address(0));
}

void *__tsan_memcpy(void *to, const void *from, unsigned long bytes)
{
    touch(from, bytes, READ, __builtin_return_address(0));
    touch(to, bytes, WRITE, __builtin_return_address(0));
    return memcpy(to, from, bytes);
}

void *__tsan_memset(void *to, int value, unsigned long bytes)
{
    touch(to, bytes, WRITE, __builtin_return_address(0));
    return memset(to, value, bytes);
}

void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

void __ubsan_handle_out_of_bounds(void *data, unsigned long index)
{
    char what[64];
    snprintf(what, sizeof what, "index %ld lies outside its array", (long)index);
    undefined(data, what);
}

void __ubsan_handle_type_mismatch_v1(void *data, unsigned long address)
{
    char what[96];
    snprintf(what, sizeof what, "address %#lx is not aligned to what is read or written there", address);
    undefined(data, what);
}

void __ubsan_handle_shift_out_of_bounds(void *data, unsigned long, unsigned long)
{
    undefined(data, "shift by a negative count, or by the width of the type or more");
}

void __ubsan_handle_divrem_overflow(void *data, unsigned long, unsigned long)
{
    undefined(data, "division by zero or without a representable result");
}
}
#pragma GCC visibility pop

#endif
