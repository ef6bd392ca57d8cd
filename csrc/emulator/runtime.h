/* Shared by the parts of the emulator's runtime; no kernel sees it. */
#ifndef FERMI_EMULATOR_RUNTIME_H
#define FERMI_EMULATOR_RUNTIME_H

#include "device.h"

#include <stdarg.h>

extern "C" {
#include "launch.h"
}

/* A row of the table that the build generates for each shared object. */
struct fermi_entry {
    const char *name;
    void (*call)(const void *args);
    uint64_t args_bytes;
};

#pragma GCC visibility push(hidden)
extern const fermi_entry fermi_entries[]; /* ends with a null name */
extern char fermi_shared_begin[] __asm__("__start_fermi_shared") __attribute__((weak));
extern char fermi_shared_end[] __asm__("__stop_fermi_shared") __attribute__((weak));

constexpr unsigned MAX_THREADS = 1024;
constexpr uint64_t MAX_SHARED = 48 * 1024;
constexpr uint64_t STACK_BYTES = 64 * 1024;
constexpr uint32_t SHARED_POISON = 0x7fcc7fccu; /* NaN as float and as half */

/* The launch that runs now. */
struct fermi_state {
    fermi_request *request;
    void (*kernel)(const void *args);
    bool failed;            /* the launch is over, whatever else would run */
    unsigned thread;        /* linear id of the running thread */
    char *dynamic_begin;
    char *stacks;           /* MAX_THREADS stacks of STACK_BYTES, each behind a guard page */
    uint64_t stacks_bytes;
};
extern fermi_state fermi_run;

/* One line of text about the running block; the launch has failed. */
void fermi_set_failure(const char *format, va_list values);
void fermi_note_failure(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same from within a thread, which never goes on. */
[[noreturn]] void fermi_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Shuffles by the launch's seed; seed 0 leaves the order. */
void fermi_shuffle(unsigned *order, unsigned n);
bool fermi_allocate_stacks();
/* Every thread of a block from its begin to its end. */
void fermi_run_threads(unsigned n);

/* Checked build (checked.cc); empty in the others. */
void fermi_watch_launch();
void fermi_watch_block();
void fermi_watch_barrier();
void fermi_watch_atomic(const void *p, uint64_t bytes, const void *pc);
void fermi_watch_end();
#pragma GCC visibility pop

#endif
