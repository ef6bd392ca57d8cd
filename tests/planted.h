
typedef struct {
    const float *x;
    float *y;
    float *z;
    int64_t n, offset;
    int32_t flag;
} planted_args;
ENTRY(planted, planted_reverse, planted_args)
ENTRY(planted, planted_warp_sum, planted_args)
ENTRY(planted, planted_diverge, planted_args)
ENTRY(planted, planted_clash, planted_args)
ENTRY(planted, planted_offset, planted_args)
ENTRY(planted, planted_shared, planted_args)
ENTRY(planted, planted_index, planted_args)
ENTRY(planted, planted_blocks, planted_args)
ENTRY(planted, planted_vector, planted_args)
ENTRY(planted, planted_fault, planted_args)
ENTRY(planted, planted_votes, planted_args)
ENTRY(planted, planted_too_much, planted_args)
ENTRY(planted, planted_where, planted_args)
ENTRY(planted, planted_math, planted_args)

typedef struct {
    float values[1024];
    float *y;
    int64_t n;
} planted_big_args;
ENTRY(planted, planted_big_arguments, planted_big_args)
