#include "rows.cuh"

INLINE float4 plus(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void group_mean(group_mean_args a)
{
    float count = (float)a.group;
    for (quad_walk at(a.rows, a.n); at.more(); at.next()) {
        int64_t row = at.row(), i = at.column(), left = a.n - i;
        const float *x = a.x + row * a.group * a.n + i;
        float4 sum = load_quad(x, left);
        for (int64_t j = 1; j < a.group; j++)
            sum = plus(sum, load_quad(x + j * a.n, left));
        float4 mean = make_float4(sum.x / count, sum.y / count, sum.z / count, sum.w / count);
        float *y = a.y + row * a.n + i;
        if (a.b)
            mean = plus(plus(load_quad(y, left), load_quad(a.b + i, left)), mean);
        store_quad(y, mean, left);
    }
}
