"""Known faults of the scalar and SSSE3 kernels and of the thread pool; tools/faults.py has the list."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """`old` stands exactly once in `file`; `new` takes its place."""

    name: str
    file: str
    old: str
    new: str
    guard: str


Q4 = "csrc/ssse3/matmul_q8.h"
SCALAR_Q4 = "csrc/scalar/matmul_q8.h"

KERNELS = (
    Fault(
        "nibble order swapped",
        Q4,
        "v[i] = _mm_and_si128(both, nibble);\n        v[4 + i] =",
        "v[4 + i] = _mm_and_si128(both, nibble);\n        v[i] =",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "offset of -8 dropped",
        Q4,
        "x->offset = _mm_set1_epi32(8 * a->sums[from + b]);",
        "x->offset = _mm_setzero_si128();",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "offset of -8 dropped, scalar",
        SCALAR_Q4,
        "isum[r] = -8 * sum;",
        "isum[r] = 0; (void)sum;",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "scales of rows 4..7 taken from rows 0..3",
        Q4,
        "{_mm_unpacklo_epi16(zero, halves), _mm_unpackhi_epi16(zero, halves)}",
        "{_mm_unpacklo_epi16(zero, halves), _mm_unpacklo_epi16(zero, halves)}",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "subnormal scales take the short way",
        Q4,
        "if (__builtin_expect(_mm_movemask_epi8(small), 0))",
        "if (0 && _mm_movemask_epi8(small))",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "scale of the next token",
        Q4,
        "_mm_mul_ps(dw, x[t].d)",
        "_mm_mul_ps(dw, x[(t + 1) % run.tokens].d)",
        "stage:gemm_q4_0_q8_0",
    ),
    Fault(
        "sums saturate in 16 bits",
        Q4,
        "sum = _mm_add_epi32(sum, _mm_madd_epi16(pairs, _mm_set1_epi16(1)));\n    }\n    return sum;",
        "sum = _mm_adds_epi16(sum, pairs);\n    }\n    return _mm_madd_epi16(sum, _mm_set1_epi16(1));",
        "stage:gemv_q8_0_q8_0",
    ),
    Fault(
        "sign of a negative scale lost",
        Q4,
        "return _mm_or_ps(f16_magnitudes(halves), _mm_and_ps(_mm_castsi128_ps(halves), _mm_set1_ps(-0.0f)));",
        "return f16_magnitudes(halves);",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "second tile of tokens is the first",
        Q4,
        "few_tokens(a, p, begin, end, t, tokens, 1);",
        "few_tokens(a, p, begin, end, 0, tokens, 1);",
        "stage:gemm_q4_0_q8_0",
    ),
    Fault(
        "subnormal scales read as normal",
        "csrc/ssse3/blocks.h",
        "return _mm_min_ps(x, _mm_sub_ps(_mm_add_ps(x, x), _mm_set1_ps(0x1p-14f)));",
        "return x;",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "activation scale 1/128", "csrc/scalar/quantize_q8_0.c", "amax / 127.0f", "amax / 128.0f", "stage:quantize_q8_0"
    ),
    Fault(
        "sign ignored in the block maximum",
        "csrc/ssse3/quantize_q8_0.c",
        "most = _mm_max_ps(most, _mm_and_ps(v, magnitude));",
        "most = _mm_max_ps(most, v);",
        "stage:quantize_q8_0",
    ),
    Fault(
        "mean of squares without eps",
        "csrc/scalar/rms_norm.c",
        "/ (float)a->n + a->eps)",
        "/ (float)a->n)",
        "stage:rms_norm",
    ),
    Fault("norm weight without its offset", "csrc/ssse3/rms_norm.c", "a->offset", "0.0f * a->offset", "stage:rms_norm"),
    Fault(
        "eps outside the root",
        "csrc/scalar/l2_norm.c",
        "__builtin_sqrtf(lane_dot(x, x, a->n) + a->eps)",
        "(__builtin_sqrtf(lane_dot(x, x, a->n)) + a->eps)",
        "stage:l2_norm",
    ),
    Fault(
        "conv taps reversed",
        "csrc/scalar/conv1d_silu.c",
        "sum += a->w[tap * a->channels + c] * input_row(a, t + tap)[c];",
        "sum += a->w[tap * a->channels + c] * input_row(a, t + a->taps - tap)[c];",
        "stage:conv1d_silu",
    ),
    Fault(
        "conv tail one row late",
        "csrc/scalar/conv1d_silu.c",
        "= input_row(a, a->tokens + i)[c];",
        "= input_row(a, a->tokens + i - 1 + (a->tokens == 0))[c];",
        "stage:conv1d_silu",
    ),
    Fault(
        "decay forgotten",
        "csrc/ssse3/gdn_recurrent.c",
        "decay[i] = f32_exp(a->g[(t + i) * a->v_heads + h]);",
        "decay[i] = 1.0f;",
        "stage:gdn_recurrent",
    ),
    Fault(
        "value head paired with key head h mod n",
        "csrc/scalar/gdn_recurrent.c",
        "h / (a->v_heads / a->k_heads)",
        "h % a->k_heads",
        "stage:gdn_recurrent",
    ),
    Fault(
        "output read before the write",
        "csrc/scalar/gdn_recurrent.c",
        "state[i * dv + j] += k[i] * u[j];\n            out[i % CHAINS][j] += q[i] * state[i * dv + j];",
        "out[i % CHAINS][j] += q[i] * state[i * dv + j];\n            state[i * dv + j] += k[i] * u[j];",
        "stage:gdn_recurrent",
    ),
    Fault(
        "infinite rate times zero",
        "csrc/scalar/gdn_gates.c",
        "rate = FLT_MAX < rate ? FLT_MAX : rate;",
        "(void)FLT_MAX;",
        "stage:gdn_gates",
    ),
    Fault(
        "RoPE turns the other way",
        "csrc/scalar/rope.c",
        "x[j] = xj * cos[j] - yj * sin[j];",
        "x[j] = xj * cos[j] + yj * sin[j];",
        "stage:rope",
    ),
    Fault(
        "causal mask one token wide",
        "csrc/scalar/attention.c",
        "int64_t seen = *a->start + item / a->heads + 1",
        "int64_t seen = *a->start + item / a->heads + (item / a->heads + *a->start == 0)",
        "stage:attention",
    ),
    Fault(
        "kv head of the neighbour",
        "csrc/ssse3/attention.c",
        "kv_source_of(a, kv_head);",
        "kv_source_of(a, (kv_head + 1) % a->kv_heads);",
        "stage:attention",
    ),
    Fault(
        "tokens that share a pass see what the last one sees",
        "csrc/ssse3/attention_rows.h",
        "return row->seen - b->first < b->n ? row->seen - b->first : b->n;",
        "return b->n + 0 * row->seen;",
        "test:tests/test_model.py::test_tokens_that_run_together_see_no_later_ones",
    ),
    Fault(
        "scale of the row's first blocks for all its slabs",
        "csrc/ssse3/kv.h",
        "row + head_dim + 2 * ((first + i) / BLOCK)",
        "row + head_dim + 2 * (i / BLOCK)",
        "stage:attention",
    ),
    Fault(
        "subnormal halves read as normal",
        "csrc/ssse3/kv.h",
        "_mm_set1_epi16(0x7800)",
        "_mm_set1_epi16((short)0x8000)",
        "stage:attention",
    ),
    Fault(
        "halves truncated",
        "csrc/scalar/kv.h",
        " + 0xfff + (magnitude >> 13 & 1)) >> 13",
        ") >> 13",
        "stage:kv_append",
    ),
    Fault(
        "halves rounded up from the middle",
        "csrc/ssse3/kv.h",
        "_mm_add_epi32(_mm_add_epi32(bits, odd), ",
        "_mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(1)), ",
        "stage:kv_append",
    ),
    Fault(
        "subnormal halves flushed to zero",
        "csrc/scalar/kv.h",
        "if (shift > 24)",
        "if (shift > 13)",
        "stage:kv_append",
    ),
    Fault(
        "a scale that no half holds kept as infinity",
        "csrc/scalar/kv.h",
        "return half < 0x7c00 ? half : 0x7e00;",
        "return half;",
        "stage:kv_append",
    ),
    Fault(
        "keys of later calls written one position early",
        "csrc/scalar/kv.h",
        "int64_t position = *a->start + item / a->kv_heads",
        "int64_t position = *a->start - (*a->start > 1) + item / a->kv_heads",
        "stage:kv_append",
    ),
    Fault(
        "rows of a page turned round by one",
        "csrc/scalar/kv.h",
        "position % page_tokens) *",
        "(position + 1) % page_tokens) *",
        "stage:kv_append",
    ),
    Fault(
        "keys kept as values too",
        "csrc/scalar/kv.h",
        "put(a->format, a->v + item",
        "put(a->format, a->k + item",
        "stage:kv_append",
    ),
    Fault(
        "old sums not corrected by the new maximum",
        "csrc/scalar/attention.c",
        "sum[i] = b > 0 ? sum[i] * s->correction[b] + acc[i] : acc[i];",
        "sum[i] = b > 0 ? sum[i] + acc[i] : acc[i];",
        "stage:attention",
    ),
    Fault(
        "router ties to the higher id",
        "csrc/scalar/topk.h",
        "at > 0 && logits[expert] > logits[ids[at - 1]]",
        "at > 0 && logits[expert] >= logits[ids[at - 1]]",
        "stage:router_topk",
    ),
    Fault(
        "an expert's rows in the order of falling tokens",
        "csrc/scalar/expert_rows.h",
        "for (int64_t t = 0; t < a->tokens; t++)",
        "for (int64_t t = a->tokens - 1; t >= 0; t--)",
        "stage:expert_rows",
    ),
    Fault(
        "rows of an expert begin one early",
        "csrc/scalar/expert_rows.h",
        "a->first[hits++] = start;",
        "a->first[hits] = start - (hits > 0);\n        hits++;",
        "stage:expert_rows",
    ),
    Fault(
        "expert rows handed to the wrong slot",
        "csrc/scalar/expert_rows.h",
        "a->row_of[slot] = row;",
        "a->row_of[row] = (int32_t)slot;",
        "stage:expert_rows",
    ),
    Fault(
        "expert taken by its place among the hits",
        "csrc/scalar/grouped.h",
        "a->w + a->hit[hit] * a->stride",
        "a->w + hit * a->stride",
        "stage:grouped_gemm_q4_0_q8_0",
    ),
    Fault(
        "rows of experts take activations in order",
        "csrc/scalar/grouped.h",
        ".source = a->source ? a->source + row : NULL,",
        ".source = NULL,",
        "stage:grouped_gemm_q4_0_q8_0",
    ),
    Fault(
        "chosen activation rows ignored",
        "csrc/scalar/matmul_q8.h",
        "source = a->source ? a->source[token] : token;",
        "source = token;",
        "stage:gemv_q4_0_q8_0",
    ),
    Fault(
        "shared expert without its gate",
        "csrc/ssse3/moe_combine.c",
        "f32_sigmoid(a->shared_gate[t])",
        "1.0f",
        "stage:moe_combine",
    ),
    Fault(
        "silu on the wrong half",
        "csrc/scalar/swiglu.c",
        "f32_silu(gate[i]) * up[i]",
        "f32_silu(up[i]) * gate[i]",
        "stage:swiglu",
    ),
    Fault(
        "NaN passed over by the block maximum",
        "csrc/ssse3/quantize_q8_0.c",
        "if (_mm_movemask_ps(unordered))",
        "if (0 && _mm_movemask_ps(unordered))",
        "test:tests/test_pool_and_nan.py::test_a_block_that_is_not_finite_is_marked",
    ),
    Fault(
        "locks of the parent kept after a fork",
        "csrc/pool.c",
        "pthread_atfork(NULL, NULL, after_fork);",
        "(void)after_fork;",
        "test:tests/test_pool_and_nan.py::test_thousands_of_short_steps_lose_no_item",
    ),
    Fault(
        "items of a short last chunk lost",
        "csrc/pool.c",
        "(s->n + grain - 1) / grain;",
        "s->n / grain + (s->n < grain);",
        "test:tests/test_pool_and_nan.py::test_thousands_of_short_steps_lose_no_item",
    ),
    Fault(
        "sleepers not woken",
        "csrc/pool.c",
        "pthread_cond_broadcast(&step_opened);",
        "",
        "test:tests/test_pool_and_nan.py::test_threads_that_sleep_are_woken",
    ),
    Fault(
        "time of a step replaces what was there",
        "csrc/pool.c",
        "call.elapsed_ns[index - 1] += now",
        "call.elapsed_ns[index - 1] = now",
        "test:tests/test_pool_and_nan.py::test_times_add_to_what_was_there",
    ),
    Fault(
        "subnormals flushed to zero",
        "csrc/pool.c",
        "#define MXCSR_DEFAULT 0x1f80u",
        "#define MXCSR_DEFAULT 0x9fc0u",
        "stage:exp_f32",
    ),
)
