#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void swiglu(swiglu_args a)
{
    for (quad_walk at(a.rows, a.n); at.more(); at.next()) {
        int64_t row = at.row(), i = at.column(), left = a.n - i;
        const float *x = a.gate_up + row * 2 * a.n + i;
        float4 gate = load_quad(x, left), up = load_quad(x + a.n, left);
        gate.x = f32_silu(gate.x) * up.x;
        gate.y = f32_silu(gate.y) * up.y;
        gate.z = f32_silu(gate.z) * up.z;
        gate.w = f32_silu(gate.w) * up.w;
        store_quad(a.y + row * a.n + i, gate, left);
    }
}
