#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void add_bias(add_bias_args a)
{
    for (quad_walk at(a.rows, a.n); at.more(); at.next()) {
        int64_t i = at.column(), left = a.n - i;
        float *x = a.x + at.row() * a.n + i;
        float4 v = load_quad(x, left), b = load_quad(a.b + i, left);
        store_quad(x, make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w), left);
    }
}

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void add_bias_residual(add_bias_residual_args a)
{
    for (quad_walk at(a.rows, a.n); at.more(); at.next()) {
        int64_t i = at.column(), left = a.n - i, place = at.row() * a.n + i;
        float4 v = load_quad(a.y + place, left), b = load_quad(a.b + i, left), x = load_quad(a.x + place, left);
        v = make_float4(x.x + (v.x + b.x), x.y + (v.y + b.y), x.z + (v.z + b.z), x.w + (v.w + b.w));
        store_quad(a.x + place, v, left);
    }
}

/* A thread has a pair of a head of q, k or v. */
extern "C" __global__ __launch_bounds__(ROW_BLOCK) void add_bias_rope(add_bias_rope_args a)
{
    unsigned half = (unsigned)a.half, width = 3 * (unsigned)a.heads, n = (unsigned)a.tokens * width * half;
    for (unsigned i = blockIdx.x * ROW_BLOCK + threadIdx.x; i < n; i += gridDim.x * ROW_BLOCK) {
        unsigned j = i % half, row = i / half, head = row % width, token = row / width, at = head * 2 * half + j;
        float *x = a.x + (int64_t)row * (2 * half) + j;
        float first = x[0] + a.b[at], second = x[half] + a.b[at + half];
        if (head < 2 * (unsigned)a.heads) {
            float cos = a.cos[(int64_t)token * half + j], sin = a.sin[(int64_t)token * half + j];
            x[0] = fmaf(first, cos, -(second * sin));
            x[half] = fmaf(second, cos, first * sin);
        } else {
            x[0] = first;
            x[half] = second;
        }
    }
}
