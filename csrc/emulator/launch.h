/* Between the emulated device (fermi_engine/kernels/emulated.py, by cffi) and the shared object of one op. Plain C. */
#ifndef FERMI_EMULATOR_LAUNCH_H
#define FERMI_EMULATOR_LAUNCH_H

#include <stdint.h>

/* A device allocation as the kernels may touch it. `shadow` is the runtime's: a record per byte of who touched it last. */
typedef struct {
    uint64_t base, size;
    char name[40];
    int32_t live; /* 0: freed, touching it is an error */
    void *shadow;
} fermi_range;

/* A shared variable of the entry, found in the shared object's symbols. */
typedef struct {
    uint64_t offset, size; /* in section fermi_shared */
    char name[56];
} fermi_shared_variable;

typedef struct {
    const char *entry;
    uint32_t grid[3], block[3];
    uint64_t dynamic_shared; /* bytes */
    const void *args;
    uint64_t args_bytes;
    uint64_t seed;           /* of the order of blocks and threads; 0: rising order */
    const fermi_shared_variable *variables;
    int64_t variable_count;
    fermi_range *ranges; /* sorted by base; only the checked build looks at them */
    int64_t range_count;
    uint64_t epoch;      /* in and out, checked build: barrier intervals run so far */
} fermi_request;

/* 0, or 1 and one line in message: diverged threads, a fault, and in the checked build a race or an access outside every
 * buffer. After an error the contents of the buffers are undefined. Not reentrant. */
int fermi_launch(fermi_request *request, char *message, int64_t message_bytes);

/* 1 if all `count` areas of `bytes` bytes hold `pattern`, laid from addresses that are multiples of 4, throughout, else 0 and the first that does not in *which. */
int fermi_intact(const uint64_t *areas, int64_t count, int64_t bytes, uint32_t pattern, int64_t *which);

#endif
