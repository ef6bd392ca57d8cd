#include "rows.cuh"

/* acc + w * v, or v where nothing weighs. */
INLINE float4 weighed(float4 acc, const float *weights, int64_t tap, float4 v)
{
    if (!weights)
        return v;
    float w = weights[tap];
    return make_float4(fmaf(w, v.x, acc.x), fmaf(w, v.y, acc.y), fmaf(w, v.z, acc.z), fmaf(w, v.w, acc.w));
}

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void add_positions(add_positions_args a)
{
    for (quad_walk at(a.tokens, a.n); at.more(); at.next()) {
        int64_t token = at.row(), i = at.column(), left = a.n - i;
        float *x = a.x + token * a.n + i;
        float4 v = load_quad(x, left), b = load_quad(a.b + i, left), p = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int64_t tap = token * a.taps; tap < (token + 1) * a.taps; tap++)
            p = weighed(p, a.weights, tap, load_quad(a.table + a.rows[tap] * a.n + i, left));
        v = make_float4((v.x + b.x) + p.x, (v.y + b.y) + p.y, (v.z + b.z) + p.z, (v.w + b.w) + p.w);
        store_quad(x, v, left);
    }
}
