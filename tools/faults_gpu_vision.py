"""Known faults of the vision towers on the GPU: their kernels, their launches, batches and memory."""

from __future__ import annotations

from tools.faults_kernels import Fault

_SM20 = "csrc/sm20/"
_PARTS, _TOWERS = "fermi_engine/model/gpu_vision.py", "fermi_engine/model/gpu_vision_towers.py"
_OWNER = "fermi_engine/gpu/vision.py"
_TEST = "test:tests/test_gpu_vision_memory.py::"
_BITS = "test:tests/test_gpu_vision.py::test_views_have_the_same_bits_alone_among_others_and_in_any_batches"

KERNELS = (
    Fault("variance of the row itself, sm_20", f"{_SM20}layer_norm.cu", "add_squares(acc, centred(load_quad(x + i, n - i), mean,",
          "add_squares(acc, centred(load_quad(x + i, n - i), 0.0f * mean,", "sm20:layer_norm"),
    Fault("eps beside the root", f"{_SM20}layer_norm.cu", "lanes) / (float)a.n + a.eps);", "lanes) / (float)a.n) + a.eps;",
          "sm20:layer_norm"),
    Fault("elements behind a row's end in its variance", f"{_SM20}layer_norm.cu", "left > 3 ? v.w - mean : 0.0f", "v.w - mean",
          "sm20:layer_norm"),
    Fault("erf of the other sign, sm_20", f"{_SM20}math.cuh", "(d < 0.0 ? g : 1.0 - g)", "(d < 0.0 ? 1.0 - g : g)",
          "sm20:gelu_erf"),
    Fault("cube of GELU without its factor, sm_20", f"{_SM20}math.cuh", "0.071354816272600254", "0.14270963254520051",
          "sm20:gelu_tanh"),
    Fault("GELU without its bias", f"{_SM20}gelu.cu", "    if (a.b) {", "    if (a.b && a.rows < 0) {", "sm20:gelu_bias"),
    Fault("bias of the row's beginning for all of it, sm_20", f"{_SM20}add_bias.cu",
          "b = load_quad(a.b + i, left);\n        store_quad(x,", "b = load_quad(a.b, left);\n        store_quad(x,",
          "sm20:add_bias"),
    Fault("residual without its bias", f"{_SM20}add_bias.cu", "x.x + (v.x + b.x)", "x.x + v.x", "sm20:add_bias_residual"),
    Fault("values turned like keys", f"{_SM20}add_bias.cu", "head < 2 * (unsigned)a.heads", "head < 3 * (unsigned)a.heads",
          "sm20:add_bias_rope"),
    Fault("angles of the head for those of the patch", f"{_SM20}add_bias.cu", "float cos = a.cos[(int64_t)token * half + j]",
          "float cos = a.cos[(int64_t)head % a.tokens * half + j]", "sm20:add_bias_rope"),
    Fault("weight of the first tap for all", f"{_SM20}add_positions.cu", "float w = weights[tap];", "float w = weights[0];",
          "sm20:add_positions"),
    Fault("mean without its quotient, sm_20", f"{_SM20}group_mean.cu", "float count = (float)a.group;", "float count = 1.0f;",
          "sm20:group_mean"),
    Fault("mean in place of the sum with it", f"{_SM20}group_mean.cu",
          "mean = plus(plus(load_quad(y, left), load_quad(a.b + i, left)), mean);",
          "mean = plus(load_quad(a.b + i, left), mean);", "sm20:mean_residual"),
)

ATTENTION = (
    Fault("a view sees those before it", f"{_SM20}full_attention.cu", "for (int begin = tile[1];", "for (int begin = 0;",
          "sm20:full_attention"),
    Fault("positions behind a view's end read", f"{_SM20}full_attention.cu", "if (row < count && t % 16 * 4 < dims)",
          "if (t % 16 * 4 < dims)",
          "sm20:full_attention"),
    Fault("positions behind a view's end weighed", f"{_SM20}full_attention.cu", "- top) : 0.0f;", "- top) : 1.0f;",
          "sm20:full_attention"),
    Fault("half of the positions lost", f"{_SM20}full_attention.cu", "+ shared[j * THREADS + (t ^ GROUP)]",
          "+ 0.0f * shared[j * THREADS + (t ^ GROUP)]", "sm20:full_attention"),
    Fault("sums of the other half read before they are there: a barrier missing", f"{_SM20}full_attention.cu",
          "acc[2 + i][j];\n        __syncthreads();", "acc[2 + i][j];", "sm20:full_attention"),
    Fault("operands overwritten while they are read: a barrier missing", f"{_SM20}full_attention.cu",
          "to_key + (from ^ SCORE_SLICE));\n        __syncthreads();", "to_key + (from ^ SCORE_SLICE));", "sm20:full_attention"),
    Fault("softmax of views without its maximum", f"{_SM20}full_attention.cu", "f32_exp(s[i * SCORE_LD] - top)",
          "f32_exp(s[i * SCORE_LD])",          "sm20:view_attention"),
    Fault("sums of earlier blocks of a view as they were", f"{_SM20}full_attention.cu", "f32_exp(b.m[row] - top), l",
          "1.0f, l", "sm20:view_attention"),
    Fault("dimensions beyond 72 from the first on", f"{_SM20}full_attention.cu", "(blockIdx.y * (int)a.head_dim + dim)",
          "(blockIdx.y * (int)a.head_dim)", "sm20:view_attention"),
    Fault("query and key of a window exchanged", f"{_SM20}window_attention.cu", "q + t / WINDOW % WINDOW * PITCH",
          "q + t % WINDOW * PITCH", "sm20:window_attention"),
    Fault("heads beyond the first eight from the first on", f"{_SM20}window_attention.cu", "(int)(item % groups) * together",
          "(int)(item % groups) * 0", "sm20:window_attention"),
    Fault("scores of a window read before they are there: a barrier missing", f"{_SM20}window_attention.cu",
          "* a.scale;\n        __syncthreads();", "* a.scale;", "sm20:window_attention"),
)

LAUNCHES = (
    Fault("wrong GELU in the layers, sm_20", _PARTS, 'self.inner(u, first, second, "gelu_tanh", u)',
          'self.inner(u, first, second, "gelu_erf", u)', "sm20:qwen_block"),
    Fault("wrong GELU in the last merger, sm_20", _PARTS, 'self.inner(u, first, second, "gelu_erf", out)',
          'self.inner(u, first, second, "gelu_tanh", out)', "sm20:qwen_tower"),
    Fault("wrong GELU in the window merger, sm_20", _TOWERS, '"gelu_tanh", merged)', '"gelu_erf", merged)', "sm20:window_merger"),
    Fault("queries, keys and values without their bias", _PARTS, "            self._k.add_bias(wide, self.bias(qkv))\n",
          "            pass\n", "sm20:minicpm_layer"),
    Fault("keys for queries in the joined matrix", _PARTS, 'f".{part}_proj.") for part in "qkv"]',
          'f".{part}_proj.") for part in "kqv"]', "sm20:minicpm_layer"),
    Fault("mean residual dropped, sm_20", _TOWERS, "    t.add_means(t.x, merged, f", "    t.bias(f", "sm20:window_merger"),
    Fault("windows of neighbours in a row", _TOWERS, '    t.reordered(t["windows"].rows(0, rows))\n', "", "sm20:window_merger"),
    Fault("projector over neighbours in a row", _TOWERS, '    t.reordered(t["blocks"].rows(0, t.x.shape[0]))\n', "",
          "sm20:minicpm_tower"),
    Fault("views as long as before they were merged", _TOWERS, 'attend = views(t, "small_tiles", grids)', "pass",
          "sm20:minicpm_tower"),
    Fault("last norm of the tower left out, sm_20", _TOWERS, "    t.swap(t.u, t.x)\n", "", "sm20:minicpm_tower"),
    Fault("rows of an MLP's second part over the first", _PARTS, "out.rows(begin, end - begin))", "out.rows(0, end - begin))",
          _BITS),
    Fault("patches of the first batch in all", _OWNER, "patches[first : first + count]", "patches[:count]", _BITS),
    Fault("memory of an encode kept", _OWNER, "        with self.ledger.scope():\n", "        if True:\n",
          f"{_TEST}test_little_memory_makes_more_batches_and_none_a_clear_line"),
    Fault("weights looked for where they were", _OWNER, "self._buffer is not None and self.ledger.holds(self._buffer)",
          "self._buffer is not None", f"{_TEST}test_weights_are_copied_once_and_again_where_they_are_gone"),
    Fault("snapshots that do not know who encoded their images", "fermi_engine/snapshots/prefix.py",
          'prefill += f", images on', 'way += f", images on', f"{_TEST}test_the_engine_encodes_where_it_is_told"),
)

GPU_VISION = KERNELS + ATTENTION + LAUNCHES
