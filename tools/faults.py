"""Known faults, one per row: where it is planted, what changes, and the guard that must catch it.

A guard "stage:NAME" is a row of the stage table: replaying the golden files must fail, and fail first at that stage; "sm20:NAME"
is the same with the GPU's kernels in the emulator.
A guard "test:FILE::NAME" is one test, which must fail. The list grows with each bug found.
"""

from __future__ import annotations

from tools.faults_avx2 import AVX2
from tools.faults_gpu_images import GPU_IMAGES
from tools.faults_gpu_prefill import GPU_PREFILL
from tools.faults_gpu_vision import GPU_VISION
from tools.faults_kernels import KERNELS, Fault
from tools.faults_quality import QUALITY
from tools.faults_resident import RESIDENT
from tools.faults_sm20 import SM20
from tools.faults_snapshot_disk import SNAPSHOT_DISK
from tools.faults_snapshots import SNAPSHOTS
from tools.faults_vision import VISION

__all__ = ["FAULTS", "Fault"]

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
        "Positions.of(self, state.position, len(ids), shift)",
        "Positions.of(self, 0, len(ids), shift)",
        "stage:decoder",
    ),
    Fault(
        "a table of pages that moved goes unnoticed",
        "fermi_engine/state.py",
        "            self._point(len(self.keys) - 1)\n        return moved",
        "            self._point(len(self.keys) - 1)\n        return False",
        "test:tests/test_model.py::test_a_table_that_grows_is_told",
    ),
    Fault(
        "a recorded step stays where it was recorded",
        "fermi_engine/model/decoder.py",
        "self._at.move(position, shift)",
        "self._at.move(0, shift)",
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
        "Snapshot(self.prefix, self.state.copy(), trail",
        "Snapshot(self.prefix, self.state, trail",
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
        "[next(states) if isinstance(layer, DeltaState)",
        "[DeltaState(layer.conv, next(states).recurrent) if isinstance(layer, DeltaState)",
        "stage:snapshot_resume",
    ),
    Fault(
        "decode does not move the position on",
        "fermi_engine/model/decoder.py",
        "state.position += len(ids)",
        "state.position += len(ids) - (len(ids) == 1)",
        "stage:decode",
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
        "axes[:] = np.arange(start + shift, start + shift + count)",
        "axes[0], axes[1:] = np.arange(start + shift, start + shift + count), 0",
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
    Fault(
        "sense: rows and columns of a tower's positions exchanged",
        "fermi_engine/model/vision_qwen.py",
        "np.stack(block_order(*grid))",
        "np.stack(block_order(*grid)[::-1])",
        "test:tests/test_tiny.py::test_questions_about_pictures[side]",
    ),
    Fault(
        "sense: images in the order of their end",
        "fermi_engine/vision/encoder.py",
        "for image, part in zip(images, parts, strict=True)",
        "for image, part in zip(reversed(images), parts, strict=False)",
        "test:tests/test_tiny.py::test_a_second_image_changes_the_answer",
    ),
    Fault(
        "sense: red exchanged with blue",
        "fermi_engine/vision/images.py",
        'np.array(image.convert("RGB"))',
        'np.array(image.convert("RGB"))[..., ::-1].copy()',
        "test:tests/test_tiny.py::test_a_second_image_changes_the_answer",
    ),
)

FAULTS = KERNELS + AVX2 + SM20 + MODEL + GPU_PREFILL + GPU_VISION + RESIDENT + SNAPSHOTS + SNAPSHOT_DISK + FILES + TEXT + VISION
FAULTS += MODEL_SENSE + QUALITY + GPU_IMAGES
