#include "fermi.cuh"

#define BLOCK 256

/* Where each hit's tiles begin: a running sum over hits, 256 at a time. */
extern "C" __global__ __launch_bounds__(BLOCK) void grouped_tiles(grouped_tiles_args a)
{
    __shared__ int sums[2][BLOCK];
    int t = (int)threadIdx.x, hits = *a.hits, tile_rows = (int)a.tile_rows, done = 0;
    for (int begin = 0; begin < hits; begin += BLOCK) {
        int hit = begin + t;
        int row = hit < hits ? a.first[hit] : 0, end = hit < hits ? a.first[hit + 1] : 0;
        int count = blocks_of(end - row, tile_rows), from = 0;
        sums[0][t] = count;
        __syncthreads();
        for (int step = 1; step < BLOCK; step *= 2) {
            sums[from ^ 1][t] = sums[from][t] + (t >= step ? sums[from][t - step] : 0);
            from ^= 1;
            __syncthreads();
        }
        int32_t *tile = a.tiles + 1 + 2 * (done + sums[from][t] - count);
        for (int i = 0; i < count; i++) {
            tile[2 * i] = hit;
            tile[2 * i + 1] = row + i * tile_rows;
        }
        done += sums[from][BLOCK - 1];
        __syncthreads();
    }
    if (t == 0)
        a.tiles[0] = done;
}
