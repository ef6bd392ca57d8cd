/* A counting sort in three launches. No atomics: a thread counts one expert's pairs, or the pairs before its own. */
#include "fermi.cuh"

enum { CHUNK = 512 }; /* pairs of a block, threads, and the most experts */

/* A chunk's expert ids to shared memory; returns how many there are. */
INLINE int chunk_ids(const expert_rows_args &a, int *ids)
{
    int64_t first = (int64_t)blockIdx.x * CHUNK;
    int count = (int)min_of<int64_t>(CHUNK, a.tokens * a.k - first), t = (int)threadIdx.x;
    if (t < count)
        ids[t] = a.ids[first + t];
    __syncthreads();
    return count;
}

/* How many of ids[0..n) are `id`. */
INLINE int occurrences(const int *ids, int n, int id)
{
    int found = 0;
    for (int i = 0; i < n; i++)
        found += ids[i] == id;
    return found;
}

/* Sum of x over this thread and those before it. Two buffers of CHUNK; all threads call it. */
INLINE int running_sum(int *buffers, int x)
{
    int t = (int)threadIdx.x, from = 0;
    __syncthreads();
    buffers[t] = x;
    __syncthreads();
    for (int step = 1; step < CHUNK; step *= 2) {
        int to = CHUNK - from;
        buffers[to + t] = buffers[from + t] + (t >= step ? buffers[from + t - step] : 0);
        from = to;
        __syncthreads();
    }
    return buffers[from + t];
}

extern "C" __global__ __launch_bounds__(CHUNK) void expert_rows_count(expert_rows_args a)
{
    __shared__ int ids[CHUNK];
    int count = chunk_ids(a, ids), e = (int)threadIdx.x;
    if (e < a.experts)
        a.counts[blockIdx.x * a.experts + e] = occurrences(ids, count, e);
}

/* Thread e has expert e: from its number of rows to where they start, in the list of hits and in each chunk. */
extern "C" __global__ __launch_bounds__(CHUNK) void expert_rows_scan(expert_rows_args a)
{
    __shared__ int buffers[2 * CHUNK], hits;
    int e = (int)threadIdx.x, experts = (int)a.experts, rows = (int)(a.tokens * a.k);
    int chunks = blocks_of(rows, (int)CHUNK), own = 0;
    for (int chunk = 0; e < experts && chunk < chunks; chunk++)
        own += a.counts[(int64_t)chunk * experts + e];
    int start = running_sum(buffers, own) - own, hit = running_sum(buffers, own > 0);
    if (e == CHUNK - 1)
        *a.hits = hits = hit;
    __syncthreads();
    if (own > 0) {
        a.hit[hit - 1] = e;
        a.first[hit - 1] = start;
    }
    if (e >= hits && e < experts) {
        a.hit[e] = -1;
        a.first[e + 1] = rows;
    }
    if (e == 0)
        a.first[hits] = rows;
    for (int chunk = 0; e < experts && chunk < chunks; chunk++) {
        int32_t *count = a.counts + ((int64_t)chunk * experts + e), n = *count;
        *count = start;
        start += n;
    }
}

extern "C" __global__ __launch_bounds__(CHUNK) void expert_rows_place(expert_rows_args a)
{
    __shared__ int ids[CHUNK];
    int count = chunk_ids(a, ids), t = (int)threadIdx.x;
    if (t >= count)
        return;
    int64_t pair = (int64_t)blockIdx.x * CHUNK + t;
    int row = a.counts[blockIdx.x * a.experts + ids[t]] + occurrences(ids, t, ids[t]);
    a.row_of[pair] = row;
    a.source[row] = (int32_t)(pair / a.k);
}
