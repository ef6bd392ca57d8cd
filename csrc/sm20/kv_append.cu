#include "fermi.cuh"

#define BLOCK 256

extern "C" __global__ __launch_bounds__(BLOCK) void kv_append(kv_append_args a)
{
    unsigned dim = (unsigned)a.head_dim, width = (unsigned)a.kv_heads * dim, count = (unsigned)a.tokens * width;
    for (unsigned i = blockIdx.x * BLOCK + threadIdx.x; i < count; i += gridDim.x * BLOCK) {
        unsigned token = i / width, head = i % width / dim;
        int64_t to = (head * a.capacity + a.start + token) * a.head_dim + i % dim;
        a.k_cache[to] = a.k[i];
        a.v_cache[to] = a.v[i];
    }
}
