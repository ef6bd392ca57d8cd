#include "rows.cuh"

/* A quad of x, plus that of the bias where there is one. */
INLINE float4 gelu_input(const gelu_args &a, int64_t row, int64_t i)
{
    int64_t left = a.n - i;
    float4 v = load_quad(a.x + row * a.n + i, left);
    if (a.b) {
        float4 b = load_quad(a.b + i, left);
        v = make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
    }
    return v;
}

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void gelu_tanh(gelu_args a)
{
    for (quad_walk at(a.rows, a.n); at.more(); at.next()) {
        int64_t row = at.row(), i = at.column();
        float4 v = gelu_input(a, row, i);
        v = make_float4(f32_gelu_tanh(v.x), f32_gelu_tanh(v.y), f32_gelu_tanh(v.z), f32_gelu_tanh(v.w));
        store_quad(a.y + row * a.n + i, v, a.n - i);
    }
}

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void gelu_erf(gelu_args a)
{
    for (quad_walk at(a.rows, a.n); at.more(); at.next()) {
        int64_t row = at.row(), i = at.column();
        float4 v = gelu_input(a, row, i);
        v = make_float4(f32_gelu_erf(v.x), f32_gelu_erf(v.y), f32_gelu_erf(v.z), f32_gelu_erf(v.w));
        store_quad(a.y + row * a.n + i, v, a.n - i);
    }
}
