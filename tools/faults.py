"""Known faults, one per row: where it is planted, what changes, and the guard that must catch it.

A guard "stage:NAME" is a row of the stage table: replaying the golden files must fail, and fail first at that stage.
A guard "test:FILE::NAME" is one test, which must fail. The list grows with each bug found.
"""

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
        "h ? _mm_unpackhi_epi16(zero, halves) : _mm_unpacklo_epi16(zero, halves)",
        "_mm_unpacklo_epi16(zero, halves)",
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
        "(kv_head * a->page_tokens + offset) * bytes",
        "((kv_head + 1) % a->kv_heads * a->page_tokens + offset) * bytes",
        "stage:attention",
    ),
    Fault(
        "tokens that share a pass see what the last one sees",
        "csrc/ssse3/attention.c",
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
        "o[d + i] = begins ? acc[i] : o[d + i] * correction + acc[i];",
        "o[d + i] = begins ? acc[i] : o[d + i] + acc[i]; (void)correction;",
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

MODEL = (
    Fault(
        "query and gate halves swapped",
        "fermi_engine/model/attention.py",
        "query = k.rms_norm(query_gate, self.q_norm, c.rms_norm_eps)",
        "query = k.rms_norm(np.roll(query_gate, head_dim, axis=1), self.q_norm, c.rms_norm_eps)",
        "stage:gated_attention",
    ),
    Fault(
        "rotary axes shifted by one",
        "fermi_engine/model/attention.py",
        "axis[which : 3 * section[which] : 3] = which",
        "axis[which - 1 : 3 * section[which] : 3] = which",
        "test:tests/test_model.py::test_axes_and_frequencies_are_those_of_the_reference",
    ),
    Fault(
        "rotary frequencies start at the second",
        "fermi_engine/model/attention.py",
        "np.float32(2 * j) / np.float32(rotary_dim)",
        "np.float32(2 * j + 2) / np.float32(rotary_dim)",
        "stage:gated_attention",
    ),
    Fault(
        "values taken from where keys are",
        "fermi_engine/model/gated_delta_net.py",
        "mixed, 2 * c.linear_key_dim, g, beta",
        "mixed, c.linear_key_dim, g, beta",
        "stage:gated_delta_net",
    ),
    Fault(
        "a and b exchanged",
        "fermi_engine/model/gated_delta_net.py",
        "k.gemm_f32(u.x, self.in_proj_a), k.gemm_f32(u.x, self.in_proj_b)",
        "k.gemm_f32(u.x, self.in_proj_b), k.gemm_f32(u.x, self.in_proj_a)",
        "stage:gated_delta_net",
    ),
    Fault(
        "shared expert fed by routed weights",
        "fermi_engine/model/moe.py",
        "k.gemm_f32(u.x, self.shared_expert_gate)",
        "np.ascontiguousarray(weights[:, :1])",
        "stage:sparse_moe",
    ),
    Fault(
        "second norm of a layer is the first",
        "fermi_engine/model/decoder.py",
        'f"layers.{index}.post_attention_layernorm.weight"',
        'f"layers.{index}.input_layernorm.weight"',
        "stage:decoder",
    ),
    Fault(
        "positions restart in every call",
        "fermi_engine/model/decoder.py",
        "Positions.of(self, state.position, len(ids))",
        "Positions.of(self, 0, len(ids))",
        "stage:decoder",
    ),
    Fault(
        "a table of pages that moved goes unnoticed",
        "fermi_engine/state.py",
        "return moved",
        "return False",
        "test:tests/test_model.py::test_a_table_that_grows_is_told",
    ),
    Fault(
        "a recorded step stays where it was recorded",
        "fermi_engine/model/decoder.py",
        "self._at.move(position)",
        "self._at.move(0)",
        "stage:snapshot_resume",
    ),
    Fault(
        "a step does not move the position on",
        "fermi_engine/model/decoder.py",
        "state.position += 1",
        "state.position += 0",
        "stage:snapshot_resume",
    ),
    Fault(
        "snapshot shares its state",
        "fermi_engine/session.py",
        "Snapshot(self.tokens, self.state.copy(), self.engine.pack_hash)",
        "Snapshot(self.tokens, self.state, self.engine.pack_hash)",
        "test:tests/test_exactness.py::test_snapshot_resumes_to_the_bit",
    ),
    Fault(
        "logits of the first token of the last block",
        "fermi_engine/session.py",
        "decoder.logits(hidden[-1:])[0]",
        "decoder.logits(hidden[:1])[0]",
        "test:tests/test_exactness.py::test_every_two_way_split",
    ),
    Fault(
        "a copied state shares its conv tail",
        "fermi_engine/state.py",
        "parts = [np.stack([getattr(state, name) for state in states]) for name in (\"conv\", \"recurrent\")]",
        "parts = [[s.conv for s in states], np.stack([s.recurrent for s in states])]",
        "stage:snapshot_resume",
    ),
    Fault(
        "decode does not move the position on",
        "fermi_engine/model/decoder.py",
        "state.position += len(ids)",
        "state.position += len(ids) - (len(ids) == 1)",
        "stage:snapshot_resume",
    ),
)

FILES = (
    Fault(
        "quantiser takes the largest magnitude without its sign",
        "fermi_engine/formats.py",
        "peak = x[np.arange(len(x)), np.abs(x).argmax(axis=1)]",
        "peak = np.abs(x).max(axis=1)",
        "stage:q4_0_quantize",
    ),
    Fault(
        "quantiser rounds by 8 instead of 8.5",
        "fermi_engine/formats.py",
        "codes += np.float32(8.5)",
        "codes += np.float32(8)",
        "stage:q4_0_quantize",
    ),
    Fault(
        "nibbles packed in pairs",
        "fermi_engine/formats.py",
        "codes[:, :16] | codes[:, 16:] << np.uint8(4)",
        "codes[:, ::2] | codes[:, 1::2] << np.uint8(4)",
        "stage:q4_0_quantize",
    ),
    Fault(
        "q8_0 codes truncated",
        "fermi_engine/formats.py",
        "codes += np.copysign(np.nextafter(np.float32(0.5), np.float32(0)), codes)",
        "codes += 0",
        "stage:q8_0_quantize",
    ),
    Fault(
        "NaN in the source let through",
        "fermi_engine/formats.py",
        "if not good.all():",
        "if False:",
        "test:tests/test_formats.py::test_nan_and_infinity_are_refused_with_their_row",
    ),
    Fault(
        "up rows before gate rows",
        "fermi_engine/checkpoint.py",
        "np.concatenate((gate, up)) if",
        "np.concatenate((up, gate)) if",
        "test:tests/test_checkpoint.py::test_expert_rows_hide_the_layout",
    ),
    Fault(
        "bf16 read as f16",
        "fermi_engine/checkpoint.py",
        '"BF16": np.dtype("<u2")',
        '"BF16": np.dtype("<f2")',
        "test:tests/test_checkpoint.py::test_every_16_bit_pattern_widens_exactly",
    ),
    Fault(
        "overlapping tensors let through",
        "fermi_engine/safetensors_header.py",
        "if entry.begin != position:",
        "if entry.begin > position:",
        "test:tests/test_checkpoint.py::test_offsets_must_tile",
    ),
    Fault(
        "truncated shard let through",
        "fermi_engine/safetensors_header.py",
        "if data_bytes < position:",
        "if data_bytes < 0:",
        "test:tests/test_checkpoint.py::test_truncated",
    ),
    Fault(
        "leftover tensors let through",
        "fermi_engine/checkpoint.py",
        "extra = ",
        "extra = [] and ",
        "test:tests/test_checkpoint.py::test_missing_and_leftover",
    ),
    Fault(
        "seal not compared",
        "fermi_engine/pack.py",
        "if last != seal_digest(header_bytes, digests):",
        "if False:",
        "test:tests/test_pack.py::test_header_that_was_touched",
    ),
    Fault(
        "checksum not compared",
        "fermi_engine/pack.py",
        "if running.digest() != digest:",
        "if False:",
        "test:tests/test_pack.py::test_check_names_the_tensor_with_a_flipped_bit",
    ),
)

TEXT = (
    Fault(
        "greedy ties to the highest id",
        "fermi_engine/sampling.py",
        "return int(np.argmax(adjusted))",
        "return int(adjusted.size - 1 - np.argmax(adjusted[::-1]))",
        "test:tests/test_sampling.py::test_greedy_takes_the_highest_and_of_ties_the_lowest_id",
    ),
    Fault(
        "repetition penalty rewards negative logits",
        "fermi_engine/sampling.py",
        "np.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)",
        "old / p.repetition_penalty",
        "test:tests/test_sampling.py::test_penalties_by_hand",
    ),
    Fault(
        "top-p keeps one token too few",
        "fermi_engine/sampling.py",
        'side="left")) + 1, order.size)',
        'side="left")), order.size) or 1',
        "test:tests/test_sampling.py::test_filters_and_draw_equal_the_slow_definition",
    ),
    Fault(
        "min-p against the sum",
        "fermi_engine/sampling.py",
        "weights.max() * np.float32(p.min_p)",
        "np.float32(total) * np.float32(p.min_p)",
        "test:tests/test_sampling.py::test_filters_and_draw_equal_the_slow_definition",
    ),
    Fault(
        "end-of-turn text shown",
        "fermi_engine/generate.py",
        "in self.eos_ids",
        "in ()",
        "test:tests/test_generate.py::test_end_of_turn_ends_and_is_not_shown",
    ),
)

# Goldens would notice these as well; here the small trained model must show them as wrong answers.
MODEL_SENSE = (
    Fault(
        "sense: value head paired with key head h mod n",
        "csrc/ssse3/gdn_recurrent.c",
        "int64_t key = (t * a->k_heads + h / (a->v_heads / a->k_heads)) * a->dk",
        "int64_t key = (t * a->k_heads + h % a->k_heads) * a->dk",
        "test:tests/test_tiny.py::test_copies_of_words_numbers_scripts_and_emoji",
    ),
    Fault(
        "sense: query head paired with key head h mod n",
        "csrc/ssse3/attention.c",
        "item = token * a->heads + kv_head * shared; h < shared; h++, item++",
        "item = token * a->heads + kv_head; h < shared; h++, item += a->kv_heads",
        "test:tests/test_tiny.py::test_arithmetic_with_the_steps_apart_from_the_answer",
    ),
    Fault(
        "sense: query and gate exchanged",
        "fermi_engine/model/attention.py",
        "query_gate = k.linear(u, self.q_proj, mode).reshape(tokens * heads, 2 * head_dim)",
        "query_gate = np.roll(k.linear(u, self.q_proj, mode).reshape(tokens * heads, 2 * head_dim), head_dim, axis=1)",
        "test:tests/test_tiny.py::test_needles_at_every_depth_of_2k_tokens",
    ),
    Fault(
        "sense: text moves along the time axis alone",
        "fermi_engine/model/decoder.py",
        "axes[:] = np.arange(start, start + count)",
        "axes[0], axes[1:] = np.arange(start, start + count), 0",
        "test:tests/test_tiny.py::test_arithmetic_with_the_steps_apart_from_the_answer",
    ),
    Fault(
        "sense: rotary frequencies over the whole head",
        "fermi_engine/model/attention.py",
        "np.float32(2 * j) / np.float32(rotary_dim)",
        "np.float32(2 * j) / np.float32(4 * rotary_dim)",
        "test:tests/test_tiny.py::test_arithmetic_with_the_steps_apart_from_the_answer",
    ),
    Fault(
        "sense: each expert exchanged with its neighbour",
        "csrc/scalar/grouped.h",
        "a->w + a->hit[hit] * a->stride",
        "a->w + (a->hit[hit] ^ 1) * a->stride",
        "test:tests/test_tiny.py::test_arithmetic_with_the_steps_apart_from_the_answer",
    ),
    Fault(
        "sense: expert 1 exchanged with expert 3",
        "csrc/scalar/grouped.h",
        "a->w + a->hit[hit] * a->stride",
        "a->w + (a->hit[hit] == 1 || a->hit[hit] == 3 ? 4 - a->hit[hit] : a->hit[hit]) * a->stride",
        "test:tests/test_tiny.py::test_tool_calls_parse_and_fit_their_schema",
    ),
    Fault(
        "sense: norm weights without their offset",
        "fermi_engine/kernels/cpu.py",
        '"x_stride": stride, "y_stride": n, "eps": eps, "offset": offset})',
        '"x_stride": stride, "y_stride": n, "eps": eps, "offset": 0.0})',
        "test:tests/test_tiny.py::test_arithmetic_with_the_steps_apart_from_the_answer",
    ),
)

FAULTS = KERNELS + MODEL + FILES + TEXT + MODEL_SENSE
