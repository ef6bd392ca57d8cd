#include "rows.cuh"

extern "C" __global__ __launch_bounds__(ROW_BLOCK) void embed(embed_args a)
{
    for (quad_walk at(a.items, a.n); at.more(); at.next()) {
        int64_t item = at.row(), i = at.column(), row = a.row_ids ? a.row_ids[item] : a.first_row + item;
        store_quad(a.y + item * a.n + i, load_quad(a.w + row * a.w_stride + i, a.n - i), a.n - i);
    }
}
