#include "gdn_chunk.cuh"

#define BLOCK 256
#define LD (SIDE + 4) /* 4 more than a multiple of 8: the 32 writes of a warp that transposes meet 32 banks */
#define LDM (CHUNK + 1)
#define CORNER 16
#define LDZ (2 * CORNER + 1)
#define HALF 16 /* steps of the two that a stage has room for: one is multiplied while the next is on its way */
#define LOWEST -128.0f /* of g: exp is 0 from -104 down, also after such a token; keeps sums of g finite */

/* A warp's lanes stand 4 high and 8 wide; a lane has pairs of rows, and four columns in pairs 16 apart. The lowest lane
 * bit counts rows and the next columns: each 64-bit load then has neighbours that want the same words, which newer
 * cards serve in one pass. */
INLINE int lane_row(int t)
{
    return 2 * ((t & 1) | ((t >> 1) & 2));
}

INLINE int lane_col(int t)
{
    return 2 * (((t >> 1) & 1) | ((t >> 2) & 6));
}

/* Column j of a lane's four, from its first on. */
INLINE int column_of(int j)
{
    return j / 2 * 16 + j % 2;
}

INLINE void add_row(float (&acc)[4], float x, float2 left, float2 right)
{
    acc[0] = fmaf(x, left.x, acc[0]);
    acc[1] = fmaf(x, left.y, acc[1]);
    acc[2] = fmaf(x, right.x, acc[2]);
    acc[3] = fmaf(x, right.y, acc[3]);
}

/* acc += x y over 4 steps, the pairs of rows 8 apart. */
INLINE void add_steps(float (&acc)[8][4], const float *x, const float *y)
{
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float2 left = *(const float2 *)(y + k * LD), right = *(const float2 *)(y + k * LD + 16);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            float2 pair = *(const float2 *)(x + k * LD + 8 * p);
            add_row(acc[2 * p], pair.x, left, right);
            add_row(acc[2 * p + 1], pair.y, left, right);
        }
    }
}

/* acc = [k; q] k^T: this warp's 32 rows (0..63 of k, 64..127 of q) by 32 columns. */
INLINE void multiply_keys(float (&acc)[8][4], const gdn_chunk_args &a, float *stage, int chunk, int key_head, int rows,
                          int cols, bool works)
{
    int t = (int)threadIdx.x, row = t / 2, part = t % 2 * 4, at = chunk * CHUNK + row % CHUNK, now = 0;
    const float *source = row < CHUNK ? key_row(a, at, key_head) : query_row(a, at, key_head);
    const float *x = stage + rows + lane_row(t), *y = stage + cols + lane_col(t);
    float *to = stage + part * LD + row;
    source += part;
    float4 first = read_quad(source), second = read_quad(source + 8);
#pragma unroll 1
    for (int left = (int)a.dk; left > 0; left -= HALF, now = HALF * LD - now) {
        stash_transposed(to + now, LD, first);
        stash_transposed(to + now + 8 * LD, LD, second);
        __syncthreads();
        source += HALF;
        if (left > HALF) {
            first = read_quad(source);
            second = read_quad(source + 8);
        }
        if (works) {
#pragma unroll 2
            for (int k = 0; k < HALF; k += 4)
                add_steps(acc, x + now + k * LD, y + now + k * LD);
        }
    }
    __syncthreads();
}

/* Sums of g since the chunk's begin, in double: differences of them are small, the sums may be far larger. A sum is that
 * of its eight rows up to its own, then those of the eights before, in order. */
INLINE void sum_gates(const gdn_chunk_args &a, float *gates, int chunk, int head, float *g, float *beta, double *c,
                      double *eights)
{
    int t = (int)threadIdx.x;
    double sum = 0.0;
    if (t < CHUNK) {
        int row = chunk * CHUNK + t, stride = (int)a.v_heads;
        float x = *row_at(a, row, a.open_g + head, stride, a.g + head, stride);
        float y = *row_at(a, row, a.open_beta + head, stride, a.beta + head, stride);
        x = x < LOWEST ? LOWEST : x; /* NaN stays */
        g[t] = exists(a, row) ? x : 0.0f;
        beta[t] = exists(a, row) ? y : 0.0f;
    }
    __syncthreads();
    if (t < CHUNK) {
        for (int i = t & ~7; i <= t; i++)
            sum += g[i];
        if (t % 8 == 7)
            eights[t / 8] = sum;
    }
    __syncthreads();
    if (t < CHUNK) {
        for (int i = 0; i < t / 8; i++)
            sum += eights[i];
        c[t] = sum;
    }
    __syncthreads();
    if (t < CHUNK) {
        gates[DECAY + t] = f32_exp((float)c[t]);
        gates[REST + t] = f32_exp((float)(c[CHUNK - 1] - c[t]));
        gates[BETA + t] = beta[t];
    }
}

/* The warp's products times decay: those of k into the system to invert, times beta; those of q into scratch. */
INLINE void put_products(const float (&acc)[8][4], float *m, float *attend, const float *beta, const double *c,
                         int rows, int cols)
{
    int t = fresh_thread(), first_row = rows % CHUNK + lane_row(t), first_column = cols + lane_col(t);
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = first_row + p * 8, column = first_column + column_of(j);
            float first = acc[2 * p][j] * f32_exp((float)(c[row] - c[column]));
            float second = acc[2 * p + 1][j] * f32_exp((float)(c[row + 1] - c[column]));
            if (rows < CHUNK) {
                m[row * LDM + column] = column < row ? beta[row] * first : 0.0f;
                m[(row + 1) * LDM + column] = column <= row ? beta[row + 1] * second : 0.0f;
            } else {
                *(float2 *)(attend + column * CHUNK + row) =
                    make_float2(column <= row ? first : 0.0f, column <= row + 1 ? second : 0.0f);
            }
        }
}

/* The inverse of two lower corners of N rows joined by a square, [[A, 0], [B, C]] -> [[A', 0], [-C' (B A'), C']], for
 * all such pairs at once; A' and C' are there already. A thread has one row and N / 8 columns. */
template <int N> INLINE void join_corners(float *m, float *z)
{
    int t = fresh_thread(), column = t % 8, i = t / 8 % N, pair = t / (8 * N);
    float *corner = m + pair * 2 * N * (LDM + 1), *square = corner + (N + i) * LDM;
    float *products = z + pair * N * LDZ + column;
    float sum[N / 8] = {};
#pragma unroll 8
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < N / 8; e++)
            sum[e] = fmaf(square[j], corner[j * LDM + column + 8 * e], sum[e]);
#pragma unroll
    for (int e = 0; e < N / 8; e++) {
        products[i * LDZ + 8 * e] = sum[e];
        sum[e] = 0.0f;
    }
    __syncthreads();
#pragma unroll 4
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < N / 8; e++)
            if (j <= i)
                sum[e] = fmaf(square[N + j], products[j * LDZ + 8 * e], sum[e]);
#pragma unroll
    for (int e = 0; e < N / 8; e++)
        square[column + 8 * e] = -sum[e];
    __syncthreads();
}

/* m, strictly lower triangular, becomes (I + m)^-1: four corners of 16 rows by forward substitution, a thread a column,
 * then joined twice. Row i is made of rows up to i alone. */
INLINE void invert(float *m, float *z)
{
    int t = fresh_thread(), column = t % CORNER, corner = t / CORNER * CORNER;
    float x[CORNER], *l = m + corner * (LDM + 1);
    if (corner < CHUNK) {
#pragma unroll
        for (int i = 0; i < CORNER; i++)
            x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < CORNER; j++)
#pragma unroll
            for (int i = 0; i < CORNER; i++)
                if (i > j)
                    x[i] = fmaf(-l[i * LDM + j], x[j], x[i]);
    }
    __syncthreads();
    if (corner < CHUNK) {
#pragma unroll
        for (int i = 0; i < CORNER; i++)
            l[i * LDM + column] = x[i];
    }
    __syncthreads();
    join_corners<CORNER>(m, z);
    join_corners<2 * CORNER>(m, z);
}

extern "C" __global__ __launch_bounds__(BLOCK) void gdn_chunk_intra(gdn_chunk_args a)
{
    __shared__ float4 shared[STAGE * LD / 4]; /* a stage of the products, then the system */
    __shared__ float z[2 * CORNER * LDZ], g[CHUNK], beta[CHUNK];
    __shared__ double c[CHUNK], eights[CHUNK / 8];
    int chunk = (int)a.first_chunk + (int)blockIdx.x, key_head = (int)blockIdx.y;
    int group = (int)a.v_heads / (int)a.k_heads;
    int warp = (int)threadIdx.x / 32, rows = warp % 4 * 32, cols = warp / 4 * 32;
    bool works = rows % CHUNK >= cols; /* the rest lies above the diagonal */
    float *m = (float *)shared, acc[8][4] = {};
    multiply_keys(acc, a, m, chunk, key_head, rows, cols, works);
#pragma unroll 1
    for (int head = key_head * group; head < (key_head + 1) * group; head++) {
        float *out = scratch_of(a, chunk, head);
        sum_gates(a, out + GATES, chunk, head, g, beta, c, eights);
        if (works)
            put_products(acc, m, out + ATTEND, beta, c, rows, cols);
        __syncthreads();
        invert(m, z);
#pragma unroll 1
        for (int at = fresh_thread(); at < CHUNK * CHUNK; at += BLOCK)
            out[STATE + at] = at / CHUNK <= at % CHUNK ? m[at % CHUNK * LDM + at / CHUNK] : 0.0f;
        __syncthreads();
    }
}
