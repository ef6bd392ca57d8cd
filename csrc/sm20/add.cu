#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void add(add_args a)
{
    for (quad_walk at(1, a.n); at.more(); at.next()) {
        int64_t i = at.column(), left = a.n - i;
        float4 x = load_quad(a.a + i, left), y = load_quad(a.b + i, left);
        store_quad(a.y + i, make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w), left);
    }
}
