"""Known faults of the AVX2 kernels; tools/faults.py has the list."""

from __future__ import annotations

from tools.faults_kernels import Fault

PRODUCTS = "csrc/avx2/matmul_q8.h"

AVX2 = (
    Fault(
        "high nibbles shifted by three",
        PRODUCTS,
        "_mm256_srli_epi16(both, 4)",
        "_mm256_srli_epi16(both, 3)",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "streams read each other's weights",
        PRODUCTS,
        "const uint8_t *wg = w + g * stride * row_of_blocks;",
        "const uint8_t *wg = w + g * row_of_blocks;",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "sums of a later run of blocks start from zero",
        PRODUCTS,
        "if (run.block > 0)",
        "if (run.block < 0)",
        "stage:gemm_q4_0_q8_0",
    ),
    Fault(
        "other bits than the scalar exp, within its limit",
        "csrc/avx2/math.h",
        "__m256 rest = _mm256_sub_ps(_mm256_sub_ps(hi, r), lo);",
        "__m256 rest = _mm256_setzero_ps();",
        "stage:decoder_q4_0",
    ),
    Fault(
        "output of the delta rule before its update",
        "csrc/avx2/gdn_recurrent.c",
        "store_n(s->state + r * s->state_stride + 8 * i, x, left - 8 * i);\n"
        "                o[i] = _mm256_add_ps(o[i], _mm256_mul_ps(qr, x));",
        "store_n(s->state + r * s->state_stride + 8 * i, x, left - 8 * i);\n"
        "                o[i] = _mm256_add_ps(o[i], _mm256_mul_ps(kr, x));",
        "stage:gdn_recurrent",
    ),
    Fault(
        "rotation the other way round",
        "csrc/avx2/rope.c",
        "store_n(x, _mm256_sub_ps(_mm256_mul_ps(xj, c), _mm256_mul_ps(yj, s)), left);",
        "store_n(x, _mm256_add_ps(_mm256_mul_ps(xj, c), _mm256_mul_ps(yj, s)), left);",
        "stage:rope",
    ),
    Fault(
        "weight of the slot before",
        "csrc/avx2/moe_combine.c",
        "__m256 weight = _mm256_set1_ps(a->weights[slot]);",
        "__m256 weight = _mm256_set1_ps(a->weights[slot - (slot > t * a->k)]);",
        "stage:moe_combine",
    ),
    Fault(
        "row ends read as if they were whole",
        "csrc/avx2/lanes.h",
        "return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_n(n));",
        "(void)n;\n    return _mm256_loadu_ps(p);",
        "stage:gemm_f32",
    ),
    Fault(
        "weights of the span before counted among those of the next",
        "csrc/avx2/attention_rows.h",
        "int begins = first % ATTENTION_SPAN == 0;",
        "int begins = first == 0;",
        "stage:attention_long",
    ),
)
