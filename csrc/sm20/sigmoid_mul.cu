#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void sigmoid_mul(sigmoid_mul_args a)
{
    for (quad_walk at(a.rows, a.n); at.more(); at.next()) {
        int64_t row = at.row(), i = at.column(), left = a.n - i;
        float4 x = load_quad(a.x + row * a.n + i, left), gate = load_quad(a.gate + row * a.gate_stride + i, left);
        x.x *= f32_sigmoid(gate.x);
        x.y *= f32_sigmoid(gate.y);
        x.z *= f32_sigmoid(gate.z);
        x.w *= f32_sigmoid(gate.w);
        store_quad(a.y + row * a.n + i, x, left);
    }
}
